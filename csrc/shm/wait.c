#define _GNU_SOURCE
#include "shm/wait.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How long to sleep before looking at deadline, end and liveness again: a dead peer is noticed within this. */
#define NAP_NS 50000000L

/* How often to look before letting go of what the caller holds: some microseconds, within which a rank that is on its
 * way comes. */
#define SHORT_SPINS 100

int64_t ah_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Atomic uint32_t *counter_of(struct ah_member *member, enum ah_counter counter)
{
    switch (counter) {
    case AH_ARRIVED:
        return &member->arrived;
    case AH_REDUCED:
        return &member->reduced;
    default:
        return &member->taken;
    }
}

static void wake(struct ah_member *member)
{
    atomic_fetch_add(&member->bell, 1);
    /* Not FUTEX_PRIVATE: whoever sleeps is another process. */
    syscall(SYS_futex, &member->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void ah_post(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    struct ah_member *self = &group->members[group->rank];

    atomic_store_explicit(counter_of(self, counter), ticket, memory_order_release);
    /* Whoever began to wait before this store is seen by the load below; whoever begins after it sees it. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&self->waiters, memory_order_relaxed) != 0)
        wake(self);
}

void ah_post_later(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    atomic_store_explicit(counter_of(&group->members[group->rank], counter), ticket, memory_order_release);
    group->unrung = 1;
}

void ah_ring_waiters(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];

    if (!group->unrung)
        return;
    group->unrung = 0;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&self->waiters, memory_order_relaxed) != 0)
        wake(self);
}

void ah_end(struct ah_group *group, enum ah_outcome_code code, uint32_t rank)
{
    uint32_t none = 0;

    atomic_compare_exchange_strong(&group->head->ended, &none, (uint32_t)code | rank << 8);
    for (uint32_t each = 0; each < group->ranks; each++)
        wake(&group->members[each]);
}

void ah_depart(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];

    atomic_store_explicit(&self->departed, 1, memory_order_release);
    wake(self);
}

int ah_ended(struct ah_group *group)
{
    uint32_t code = atomic_load_explicit(&group->head->ended, memory_order_acquire);

    if (code != 0)
        group->culprit = code >> 8;
    return (int)(code & 0xff);
}

static int is_dead(const struct ah_group *group, uint32_t rank)
{
    struct pollfd look = {.fd = group->pidfds[rank], .events = POLLIN};

    return look.fd >= 0 && poll(&look, 1, 0) == 1;
}

/* Sleep until `rank` rings, at most a nap. */
static void nap(struct ah_member *member, _Atomic uint32_t *counter, uint32_t ticket)
{
    const struct timespec limit = {.tv_nsec = NAP_NS};
    uint32_t bell;

    atomic_fetch_add(&member->waiters, 1);
    bell = atomic_load(&member->bell);
    if (!ah_has_reached(atomic_load(counter), ticket))
        syscall(SYS_futex, &member->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    atomic_fetch_sub(&member->waiters, 1);
}

static void let_go(struct ah_group *group)
{
    void (*now)(void *) = group->let_go;

    group->let_go = NULL;
    if (now)
        now(group->context);
}

int ah_await_word(struct ah_group *group, uint32_t rank, _Atomic uint32_t *word, uint32_t want)
{
    struct ah_member *member = &group->members[rank];
    int code, last_look = 0;

    for (uint32_t spin = 0; spin < group->spins; spin++) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        if (spin == SHORT_SPINS) {
            ah_ring_waiters(group);
            let_go(group);
        }
        ah_relax();
    }
    if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
        return AH_OK;
    ah_ring_waiters(group);
    let_go(group);
    for (uint32_t yield = 0; yield < group->yields; yield++) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        sched_yield();
    }
    for (;;) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        if ((code = ah_ended(group)) != 0)
            return code;
        if (last_look || ah_clock_ns() >= group->deadline_ns) {
            /* One more look at the counter after the look that found it late or dead: it may have posted last. */
            if (!last_look) {
                last_look = AH_TIMEOUT;
                continue;
            }
            group->culprit = rank;
            if (last_look == AH_DEAD)
                ah_end(group, AH_DEAD, rank);
            return last_look;
        }
        if (is_dead(group, rank)) {
            last_look = AH_DEAD;
            continue;
        }
        if (atomic_load_explicit(&member->departed, memory_order_acquire) != 0) {
            last_look = AH_LEFT;
            continue;
        }
        if (group->pulse && group->pulse(group->context) != 0) {
            ah_end(group, AH_ABORTED, group->rank);
            group->culprit = group->rank;
            return AH_INTERRUPTED;
        }
        nap(member, word, want);
    }
}

int ah_await(struct ah_group *group, uint32_t rank, enum ah_counter counter, uint32_t ticket)
{
    return ah_await_word(group, rank, counter_of(&group->members[rank], counter), ticket);
}

int ah_await_all(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        int code = rank == group->rank ? AH_OK : ah_await(group, rank, counter, ticket);

        if (code != AH_OK)
            return code;
    }
    return AH_OK;
}

int ah_await_slot(struct ah_group *group, uint32_t ticket)
{
    return ah_await_all(group, AH_TAKEN, ticket - AH_DEPTH + 1);
}
