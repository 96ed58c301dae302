#include "shm/fingerprint.h"

#include "collectives/collective.h"
#include "shm/wait.h"

static struct ah_fingerprint *fingerprint_at(const struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    return &group->members[rank].fingerprints[sequence % AH_CALL_DEPTH];
}

int ah_call_mismatch(struct ah_group *group, uint32_t rank)
{
    if (ah_group_status(group) == AH_OK)
        group->found_mismatch = 1;
    ah_group_end(group, AH_MISMATCH, rank);
    group->culprit = rank;
    return AH_MISMATCH;
}

/* Compare what we and `rank` called; its fingerprint is published. */
static int compare(struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    const struct ah_call *mine = &fingerprint_at(group, group->rank, sequence)->call;
    const struct ah_call *theirs = &fingerprint_at(group, rank, sequence)->call;

    if (theirs->sequence == mine->sequence && theirs->kind == mine->kind && theirs->reduce == mine->reduce &&
        theirs->dtype == mine->dtype && theirs->count == mine->count && theirs->root == mine->root &&
        theirs->list_digest == mine->list_digest)
        return AH_OK;
    /* The report is about this call. */
    group->call = *mine;
    return ah_call_mismatch(group, rank);
}

/* The same for a call that ended uncompared: part sizes were not compared there either. */
static int compare_uncompared(struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    const struct ah_fingerprint *mine = fingerprint_at(group, group->rank, sequence);
    const struct ah_fingerprint *theirs = fingerprint_at(group, rank, sequence);
    int code = compare(group, rank, sequence);

    if (code == AH_OK && mine->call.kind == AH_SCATTER && mine->bytes != theirs->bytes) {
        group->call = mine->call;
        code = ah_call_mismatch(group, rank);
    }
    return code;
}

static int is_published(const struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    return ah_has_reached(atomic_load_explicit(&fingerprint_at(group, rank, sequence)->stamp, memory_order_acquire),
                          sequence + 1);
}

/* Compare our uncompared calls below `end` with those that `rank` has published; `checked` is the first that it has
 * not. */
static int compare_uncompared_with(struct ah_group *group, uint32_t rank, uint32_t end, uint32_t *checked)
{
    uint32_t sequence = group->uncompared;
    int code = AH_OK;

    while (code == AH_OK && sequence != end && is_published(group, rank, sequence))
        code = compare_uncompared(group, rank, sequence++);
    *checked = sequence;
    return code;
}

/* Compare our uncompared calls with those that all ranks have published, and publish how far. */
static int compare_all_uncompared(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];
    uint32_t end = (uint32_t)group->sequence, all = end, checked;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        int code = compare_uncompared_with(group, rank, end, &checked);

        if (code != AH_OK)
            return code;
        all = ah_has_reached(checked, all) ? all : checked;
    }
    group->uncompared = all;
    atomic_store_explicit(&self->checked, all, memory_order_release);
    group->wake_due = 1;
    return AH_OK;
}

/* The same before a call that waits for all ranks: of two ranks that differ, the later one finds the other's
 * fingerprint, so neither completes that call. The fence is for two that arrive at the same time: each has published
 * its fingerprint, and at least one of them sees the other's. */
static int compare_all_uncompared_fenced(struct ah_group *group)
{
    atomic_thread_fence(memory_order_seq_cst);
    return compare_all_uncompared(group);
}

/* Wait until the fingerprint of the call AH_CALL_DEPTH before this one may be reused: we have compared that call, and
 * no rank needs the fingerprint. */
static int await_free_fingerprint(struct ah_group *group, uint32_t oldest)
{
    uint32_t reusable;
    int code = AH_OK;

    if (!ah_has_reached(group->uncompared, oldest)) {
        for (uint32_t rank = 0; code == AH_OK && rank < group->ranks; rank++)
            code = ah_wait_word(group, rank, &fingerprint_at(group, rank, oldest - 1)->stamp, oldest);
        if (code == AH_OK)
            code = compare_all_uncompared(group);
        if (code != AH_OK)
            return code;
    }
    ah_wake_waiters(group);
    reusable = group->uncompared;
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        _Atomic uint32_t *checked = &group->members[rank].checked;
        uint32_t theirs;

        if (rank == group->rank)
            continue;
        if ((code = ah_wait_word(group, rank, checked, oldest)) != AH_OK)
            return code;
        theirs = atomic_load_explicit(checked, memory_order_acquire);
        reusable = ah_has_reached(theirs, reusable) ? reusable : theirs;
    }
    group->reusable = reusable;
    return AH_OK;
}

int ah_call_begin(struct ah_group *group, const struct ah_call *call, uint32_t bytes, size_t largest,
                  int64_t timeout_ns)
{
    struct ah_member *self = &group->members[group->rank];
    int64_t now = group->now_ns ? group->now_ns : ah_clock_ns();
    uint32_t sequence = (uint32_t)group->sequence, oldest = sequence - AH_CALL_DEPTH + 1;
    struct ah_fingerprint *fingerprint;
    int code;

    group->now_ns = 0;
    group->deadline_ns = timeout_ns < 0 ? INT64_MAX : now + timeout_ns;
    if ((!ah_has_reached(group->uncompared, oldest) || !ah_has_reached(group->reusable, oldest)) &&
        (code = await_free_fingerprint(group, oldest)) != AH_OK)
        return code;
    if (call->root < 0 && group->uncompared != sequence && (code = compare_all_uncompared_fenced(group)) != AH_OK)
        return code;
    group->call = *call;
    group->call.sequence = group->sequence++;
    fingerprint = ah_fingerprint_of(group, group->rank);
    fingerprint->call = group->call;
    fingerprint->bytes = bytes;
    if (fingerprint->window != 0) /* else the second cache line is not written */
        fingerprint->window = 0;
    atomic_store_explicit(&self->largest[sequence % AH_CALL_DEPTH], largest, memory_order_relaxed);
    atomic_store_explicit(&self->begun, sequence + 1, memory_order_release);
    return ah_group_status(group);
}

void ah_call_publish(struct ah_group *group)
{
    struct ah_fingerprint *fingerprint = ah_fingerprint_of(group, group->rank);

    atomic_store_explicit(&fingerprint->stamp, (uint32_t)group->call.sequence + 1, memory_order_release);
    group->wake_due = 1;
}

int ah_call_compare_one(struct ah_group *group, uint32_t rank)
{
    uint32_t sequence = (uint32_t)group->call.sequence;
    int code = ah_wait_word(group, rank, &ah_fingerprint_of(group, rank)->stamp, sequence + 1);

    return code == AH_OK ? compare(group, rank, sequence) : code;
}

int ah_call_compare_all(struct ah_group *group)
{
    uint32_t sequence = (uint32_t)group->call.sequence, checked;
    int code = AH_OK;

    for (uint32_t rank = 0; code == AH_OK && rank < group->ranks; rank++) {
        if (rank != group->rank)
            code = ah_call_compare_one(group, rank);
        if (code == AH_OK && group->uncompared != sequence)
            code = compare_uncompared_with(group, rank, sequence, &checked);
    }
    if (code != AH_OK)
        return code;
    group->uncompared = sequence;
    /* All ranks have ended the calls before this one, and in the last one without a root all compared with all. */
    group->reusable = ah_has_reached(group->reusable, group->synchronized) ? group->reusable : group->synchronized;
    if (group->call.root < 0)
        group->synchronized = sequence + 1;
    return AH_OK;
}

/* Prefetch the line that the next call writes first: other ranks have read it. */
static void prefetch_next(struct ah_group *group)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*fingerprint_at(group, group->rank, (uint32_t)group->sequence)));
#else
    __builtin_prefetch(fingerprint_at(group, group->rank, (uint32_t)group->sequence), 1);
#endif
}

void ah_call_end(struct ah_group *group)
{
    uint32_t sequence = (uint32_t)group->call.sequence;

    if (group->uncompared == sequence) {
        group->uncompared = sequence + 1;
        atomic_store_explicit(&group->members[group->rank].checked, group->uncompared, memory_order_release);
        group->wake_due = 1;
    }
    ah_wake_waiters(group);
    prefetch_next(group);
}

void ah_call_end_uncompared(struct ah_group *group)
{
    ah_wake_waiters(group);
    prefetch_next(group);
}

void ah_call_end_chunks(struct ah_group *group, uint32_t ticket)
{
    struct ah_member *self = &group->members[group->rank];

    group->ticket = ticket;
    atomic_store_explicit(&self->arrived, ticket, memory_order_release);
    atomic_store_explicit(&self->reduced, ticket, memory_order_release);
    atomic_store_explicit(&self->consumed, ticket, memory_order_release);
    group->wake_due = 1;
    ah_call_end(group);
}
