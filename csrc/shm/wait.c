#define _GNU_SOURCE
#include "shm/wait.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Longest sleep between two checks of deadline, end and liveness: bounds the detection of dead peers. */
#define SLEEP_NS 50000000L

/* Polls before `on_long_wait`: some microseconds, enough for a rank that has begun its call. */
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
        return &member->consumed;
    }
}

static void wake(struct ah_member *member)
{
    atomic_fetch_add(&member->wake_count, 1);
    /* Not FUTEX_PRIVATE: the sleeper is in another process. */
    syscall(SYS_futex, &member->wake_count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void ah_counter_set(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    struct ah_member *self = &group->members[group->rank];

    atomic_store_explicit(counter_of(self, counter), ticket, memory_order_release);
    /* Store-load fence: a waiter that registered before this store is seen below; a later one sees the store. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&self->waiters, memory_order_relaxed) != 0)
        wake(self);
}

void ah_counter_set_lazy(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    atomic_store_explicit(counter_of(&group->members[group->rank], counter), ticket, memory_order_release);
    group->wake_due = 1;
}

void ah_wake_waiters(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];

    if (!group->wake_due)
        return;
    group->wake_due = 0;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&self->waiters, memory_order_relaxed) != 0)
        wake(self);
}

void ah_group_end(struct ah_group *group, enum ah_outcome_code code, uint32_t rank)
{
    uint32_t none = 0;

    atomic_compare_exchange_strong(&group->head->ended, &none, (uint32_t)code | rank << 8);
    for (uint32_t each = 0; each < group->ranks; each++)
        wake(&group->members[each]);
}

void ah_group_leave(struct ah_group *group)
{
    struct ah_member *self = &group->members[group->rank];

    atomic_store_explicit(&self->left, 1, memory_order_release);
    wake(self);
}

int ah_group_status(struct ah_group *group)
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

/* Sleep until the owner of `member` wakes its waiters, at most SLEEP_NS. */
static void sleep_until_woken(struct ah_member *member, _Atomic uint32_t *counter, uint32_t ticket)
{
    const struct timespec limit = {.tv_nsec = SLEEP_NS};
    uint32_t wake_count;

    atomic_fetch_add(&member->waiters, 1);
    wake_count = atomic_load(&member->wake_count);
    if (!ah_has_reached(atomic_load(counter), ticket))
        syscall(SYS_futex, &member->wake_count, FUTEX_WAIT, wake_count, &limit, NULL, 0);
    atomic_fetch_sub(&member->waiters, 1);
}

static void on_long_wait(struct ah_group *group)
{
    void (*now)(void *) = group->on_long_wait;

    group->on_long_wait = NULL;
    if (now)
        now(group->context);
}

int ah_wait_word(struct ah_group *group, uint32_t rank, _Atomic uint32_t *word, uint32_t want)
{
    struct ah_member *member = &group->members[rank];
    int code, last_look = 0;

    for (uint32_t spin = 0; spin < group->spins; spin++) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        if (spin == SHORT_SPINS) {
            ah_wake_waiters(group);
            on_long_wait(group);
        }
        ah_relax();
    }
    if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
        return AH_OK;
    ah_wake_waiters(group);
    on_long_wait(group);
    for (uint32_t yield = 0; yield < group->yields; yield++) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        sched_yield();
    }
    for (;;) {
        if (ah_has_reached(atomic_load_explicit(word, memory_order_acquire), want))
            return AH_OK;
        if ((code = ah_group_status(group)) != 0)
            return code;
        if (last_look || ah_clock_ns() >= group->deadline_ns) {
            /* Check the word once more: the peer may have set it just before it died, left or was late. */
            if (!last_look) {
                last_look = AH_TIMEOUT;
                continue;
            }
            group->culprit = rank;
            if (last_look == AH_DEAD)
                ah_group_end(group, AH_DEAD, rank);
            return last_look;
        }
        if (is_dead(group, rank)) {
            last_look = AH_DEAD;
            continue;
        }
        if (atomic_load_explicit(&member->left, memory_order_acquire) != 0) {
            last_look = AH_LEFT;
            continue;
        }
        if (group->check_interrupt && group->check_interrupt(group->context) != 0) {
            ah_group_end(group, AH_ABORTED, group->rank);
            group->culprit = group->rank;
            return AH_INTERRUPTED;
        }
        sleep_until_woken(member, word, want);
    }
}

int ah_wait_counter(struct ah_group *group, uint32_t rank, enum ah_counter counter, uint32_t ticket)
{
    return ah_wait_word(group, rank, counter_of(&group->members[rank], counter), ticket);
}

int ah_wait_all(struct ah_group *group, enum ah_counter counter, uint32_t ticket)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        int code = rank == group->rank ? AH_OK : ah_wait_counter(group, rank, counter, ticket);

        if (code != AH_OK)
            return code;
    }
    return AH_OK;
}

int ah_wait_slot(struct ah_group *group, uint32_t ticket)
{
    return ah_wait_all(group, AH_CONSUMED, ticket - AH_SLOTS + 1);
}
