#include "shm/fingerprint.h"

#include "collectives/collective.h"
#include "shm/wait.h"

static struct ah_card *card_at(const struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    return &group->members[rank].cards[sequence % AH_CALLS];
}

int ah_differ(struct ah_group *group, uint32_t rank)
{
    if (ah_ended(group) == AH_OK)
        group->found = 1;
    ah_end(group, AH_MISMATCH, rank);
    group->culprit = rank;
    return AH_MISMATCH;
}

/* Compare what we and `rank` called; its card is published. */
static int compare(struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    const struct ah_call *mine = &card_at(group, group->rank, sequence)->call;
    const struct ah_call *theirs = &card_at(group, rank, sequence)->call;

    if (theirs->sequence == mine->sequence && theirs->kind == mine->kind && theirs->reduce == mine->reduce &&
        theirs->dtype == mine->dtype && theirs->count == mine->count && theirs->root == mine->root)
        return AH_OK;
    /* Whoever writes the sentence asks about this call. */
    group->call = *mine;
    return ah_differ(group, rank);
}

/* The same for a call that we left: nobody has looked at sizes there. */
static int compare_left(struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    const struct ah_card *mine = card_at(group, group->rank, sequence), *theirs = card_at(group, rank, sequence);
    int code = compare(group, rank, sequence);

    if (code == AH_OK && mine->call.kind == AH_SCATTER && mine->bytes != theirs->bytes) {
        group->call = mine->call;
        code = ah_differ(group, rank);
    }
    return code;
}

static int is_published(const struct ah_group *group, uint32_t rank, uint32_t sequence)
{
    return ah_has_reached(atomic_load_explicit(&card_at(group, rank, sequence)->stamp, memory_order_acquire),
                          sequence + 1);
}

/* Compare what we left below `end` with what `rank` has called of it by now; `checked` is the first that was not. */
static int settle_with(struct ah_group *group, uint32_t rank, uint32_t end, uint32_t *checked)
{
    uint32_t sequence = group->pending;
    int code = AH_OK;

    while (code == AH_OK && sequence != end && is_published(group, rank, sequence))
        code = compare_left(group, rank, sequence++);
    *checked = sequence;
    return code;
}

/* Compare what we left with what everyone has called by now, and say so. */
static int settle(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];
    uint32_t end = (uint32_t)group->sequence, all = end, checked;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        int code = settle_with(group, rank, end, &checked);

        if (code != AH_OK)
            return code;
        all = ah_has_reached(checked, all) ? all : checked;
    }
    group->pending = all;
    atomic_store_explicit(&self->checked, all, memory_order_release);
    group->unrung = 1;
    return AH_OK;
}

/* The same before a call that waits for everyone: of two ranks that differ, whoever comes to it last finds the other's card,
 * and so nobody gets through that call. The fence is for two that come at the same time: each has published its own card, and
 * at least one of them sees the other's. */
static int settle_first(struct ah_group *group)
{
    atomic_thread_fence(memory_order_seq_cst);
    return settle(group);
}

/* Wait until the card of the call AH_CALLS before this one may be written: we have compared it, and nobody needs it. */
static int make_room(struct ah_group *group, uint32_t oldest)
{
    uint32_t room;
    int code = AH_OK;

    if (!ah_has_reached(group->pending, oldest)) {
        for (uint32_t rank = 0; code == AH_OK && rank < group->ranks; rank++)
            code = ah_await_word(group, rank, &card_at(group, rank, oldest - 1)->stamp, oldest);
        if (code == AH_OK)
            code = settle(group);
        if (code != AH_OK)
            return code;
    }
    ah_ring_waiters(group);
    room = group->pending;
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        _Atomic uint32_t *checked = &group->members[rank].checked;
        uint32_t theirs;

        if (rank == group->rank)
            continue;
        if ((code = ah_await_word(group, rank, checked, oldest)) != AH_OK)
            return code;
        theirs = atomic_load_explicit(checked, memory_order_acquire);
        room = ah_has_reached(theirs, room) ? room : theirs;
    }
    group->room = room;
    return AH_OK;
}

int ah_begin(struct ah_group *group, const struct ah_call *call, uint32_t bytes, size_t largest, int64_t timeout_ns)
{
    struct ah_member *self = &group->members[group->rank];
    int64_t now = group->now_ns ? group->now_ns : ah_clock_ns();
    uint32_t sequence = (uint32_t)group->sequence, oldest = sequence - AH_CALLS + 1;
    struct ah_card *card;
    int code;

    group->now_ns = 0;
    group->deadline_ns = timeout_ns < 0 ? INT64_MAX : now + timeout_ns;
    if ((!ah_has_reached(group->pending, oldest) || !ah_has_reached(group->room, oldest)) &&
        (code = make_room(group, oldest)) != AH_OK)
        return code;
    if (call->root < 0 && group->pending != sequence && (code = settle_first(group)) != AH_OK)
        return code;
    group->call = *call;
    group->call.sequence = group->sequence++;
    card = ah_card_of(group, group->rank);
    card->call = group->call;
    card->bytes = bytes;
    if (card->window != 0) /* else the second line is left alone */
        card->window = 0;
    atomic_store_explicit(&self->largest[sequence % AH_CALLS], largest, memory_order_relaxed);
    atomic_store_explicit(&self->noted, sequence + 1, memory_order_release);
    return ah_ended(group);
}

void ah_publish(struct ah_group *group)
{
    struct ah_card *card = ah_card_of(group, group->rank);

    atomic_store_explicit(&card->stamp, (uint32_t)group->call.sequence + 1, memory_order_release);
    group->unrung = 1;
}

int ah_meet_one(struct ah_group *group, uint32_t rank)
{
    uint32_t sequence = (uint32_t)group->call.sequence;
    int code = ah_await_word(group, rank, &ah_card_of(group, rank)->stamp, sequence + 1);

    return code == AH_OK ? compare(group, rank, sequence) : code;
}

int ah_meet(struct ah_group *group)
{
    uint32_t sequence = (uint32_t)group->call.sequence, checked;
    int code = AH_OK;

    for (uint32_t rank = 0; code == AH_OK && rank < group->ranks; rank++) {
        if (rank != group->rank)
            code = ah_meet_one(group, rank);
        if (code == AH_OK && group->pending != sequence)
            code = settle_with(group, rank, sequence, &checked);
    }
    if (code != AH_OK)
        return code;
    group->pending = sequence;
    /* Everyone is done with all calls before this one, and in the last one that has no root everyone compared with all. */
    group->room = ah_has_reached(group->room, group->met) ? group->room : group->met;
    if (group->call.root < 0)
        group->met = sequence + 1;
    return AH_OK;
}

/* Get the line that the next call writes first, while the caller is about other things: others have read it. */
static void look_ahead(struct ah_group *group)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*card_at(group, group->rank, (uint32_t)group->sequence)));
#else
    __builtin_prefetch(card_at(group, group->rank, (uint32_t)group->sequence), 1);
#endif
}

void ah_close(struct ah_group *group)
{
    uint32_t sequence = (uint32_t)group->call.sequence;

    if (group->pending == sequence) {
        group->pending = sequence + 1;
        atomic_store_explicit(&group->members[group->rank].checked, group->pending, memory_order_release);
        group->unrung = 1;
    }
    ah_ring_waiters(group);
    look_ahead(group);
}

void ah_leave(struct ah_group *group)
{
    ah_ring_waiters(group);
    look_ahead(group);
}

void ah_finish(struct ah_group *group, uint32_t ticket)
{
    struct ah_member *self = &group->members[group->rank];

    group->ticket = ticket;
    atomic_store_explicit(&self->arrived, ticket, memory_order_release);
    atomic_store_explicit(&self->reduced, ticket, memory_order_release);
    atomic_store_explicit(&self->taken, ticket, memory_order_release);
    group->unrung = 1;
    ah_close(group);
}
