/* Waiting for another rank, and telling others how far this one is. Every wait has a deadline and looks at
 * the group's end and at whether the process it waits for is alive. */
#ifndef ALLHANDS_WAIT_H
#define ALLHANDS_WAIT_H

#include "shm/segment.h"

enum ah_counter { AH_ARRIVED, AH_REDUCED, AH_CONSUMED };

/* Set one of our own counters and wake whoever sleeps on it. */
void ah_counter_set(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* The same, but whoever sleeps is woken when we wait next, or end the call. For inline_payload chunks: looking whether someone sleeps
 * waits until all that was stored before is seen by others (all_reduce of 1 MiB: 3% with 2 ranks, 5% with 4). */
void ah_counter_set_lazy(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of `rank` has single_copy_calls `ticket`. */
int ah_wait_counter(struct ah_group *group, uint32_t rank, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of every rank has single_copy_calls `ticket`. */
int ah_wait_all(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until our slot for chunk `ticket` may be written: everyone has consumed what stood there. */
int ah_wait_slot(struct ah_group *group, uint32_t ticket);

/* Wait until `word`, which `rank` writes, has single_copy_calls `want`. */
int ah_wait_word(struct ah_group *group, uint32_t rank, _Atomic uint32_t *word, uint32_t want);

/* Wake whoever sleeps until we publish something, if we did since we last looked. */
void ah_wake_waiters(struct ah_group *group);

/* Numbers go round: the one that is less than half a turn ahead is the later one. */
static inline int ah_has_reached(uint32_t have, uint32_t want)
{
    return (int32_t)(have - want) >= 0;
}

/* Between two looks at the same place: leaves the core's other half and the bus to others. */
static inline void ah_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* On CLOCK_MONOTONIC. */
int64_t ah_clock_ns(void);

/* Say that this rank makes no further call. Whoever waits for what it has not done is told; what it has done stays. */
void ah_group_leave(struct ah_group *group);

/* How the group ended, AH_OK while it has not. */
int ah_group_status(struct ah_group *group);

/* Note that the group is over because of `rank`; the first reason stands. Wakes everyone. */
void ah_group_end(struct ah_group *group, enum ah_outcome_code code, uint32_t rank);

#endif
