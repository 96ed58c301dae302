/* Waiting for another rank, and telling others how far this one is. Every wait has a deadline and looks at
 * the group's end and at whether the process it waits for is alive. */
#ifndef ALLHANDS_WAIT_H
#define ALLHANDS_WAIT_H

#include "segment.h"

enum ah_counter { AH_ARRIVED, AH_REDUCED, AH_TAKEN };

/* Begin a call: note what it is, compare it with those who are already there. */
int ah_begin(struct ah_group *group, const struct ah_call *call, int64_t timeout_ns);

/* Set one of our own counters and wake whoever sleeps on it. */
void ah_post(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of `rank` has reached `ticket`. */
int ah_await(struct ah_group *group, uint32_t rank, enum ah_counter counter, uint32_t ticket);

/* Wait until `counter` of every rank has reached `ticket`. */
int ah_await_all(struct ah_group *group, enum ah_counter counter, uint32_t ticket);

/* Wait until our slot for chunk `ticket` may be written: everyone has taken what stood there. */
int ah_await_slot(struct ah_group *group, uint32_t ticket);

/* Wait until everyone is in this call (has posted the first chunk, or passed it) and compare the calls. */
int ah_meet(struct ah_group *group);

/* Compare what `rank` calls with what we call; AH_MISMATCH ends the group. Only once it has arrived. */
int ah_compare(struct ah_group *group, uint32_t rank);

/* End a call whose chunks took the tickets up to `ticket`: all our counters stand there. */
void ah_finish(struct ah_group *group, uint32_t ticket);

/* Say that this rank makes no further call. Whoever waits for what it has not done is told; what it has done stays. */
void ah_depart(struct ah_group *group);

/* How the group ended, AH_OK while it has not. */
int ah_ended(struct ah_group *group);

/* Note that the group is over because of `rank`; the first reason stands. Wakes everyone. */
void ah_end(struct ah_group *group, enum ah_code code, uint32_t rank);

#endif
