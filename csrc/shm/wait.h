/* Waiting for other ranks, and publishing this rank's progress. Every wait has a deadline and checks the group's end,
 * the peer's liveness and pending signals. */
#ifndef ALLHANDS_WAIT_H
#define ALLHANDS_WAIT_H

#include "shm/segment.h"

enum ah_counter { AH_ARRIVED, AH_REDUCED, AH_CONSUMED };

/* Set one of our counters and wake the ranks that sleep on it. */
void ah_counter_set(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Set a counter; sleepers are woken at our next wait or at the end of the call. For small chunks: checking for
 * sleepers needs a full fence (all_reduce of 1 MiB: 3% with 2 ranks, 5% with 4). */
void ah_counter_set_lazy(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of `rank` has reached `ticket`. */
int ah_wait_counter(struct ah_group *group, uint32_t rank, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of every rank has reached `ticket`. */
int ah_wait_all(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until our slot for chunk `ticket` may be written: all ranks have consumed its previous chunk. */
int ah_wait_slot(struct ah_group *group, uint32_t ticket);

/* Wait until `word`, which `rank` writes, has reached `want`. */
int ah_wait_word(struct ah_group *group, uint32_t rank, _Atomic uint32_t *word, uint32_t want);

/* Wake the ranks that sleep on our counters, if we have set one since the last check. */
void ah_wake_waiters(struct ah_group *group);

/* Serial number arithmetic: the number less than half of the range ahead is the later one. */
static inline int ah_has_reached(uint32_t have, uint32_t want)
{
    return (int32_t)(have - want) >= 0;
}

/* Pause between two polls: leaves the core's resources to its hyperthread. */
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

/* Publish that this rank makes no further call. Peers that wait for one end with AH_LEFT; published data stays. */
void ah_group_leave(struct ah_group *group);

/* The outcome of the group, AH_OK while it is alive. */
int ah_group_status(struct ah_group *group);

/* End the group because of `rank`; the first reason is kept. Wakes all ranks. */
void ah_group_end(struct ah_group *group, enum ah_outcome_code code, uint32_t rank);

#endif
