/* Hands: threads of a rank that help with a large call where there are cores for them. One core moves a quarter of what the
 * memory of a common machine could; the helper_threads of a rank share the tensor between them, each with the same helper of the
 * other ranks, in counters and slots of its own. What is reduced, and in which order, does not depend on how many there are. */
#ifndef ALLHANDS_HELPER_THREADS_H
#define ALLHANDS_HELPER_THREADS_H

#include "shm/segment.h"

/* One part of a call: number `part` of `parts`, as `view` sees the group. Part 0 is done by the caller, in the group itself. */
typedef int (*ah_part_work)(struct ah_group *view, const void *job, uint32_t part, uint32_t parts);

/* How many parts `bytes` are to be done in: the same on every rank. */
uint32_t ah_part_count(const struct ah_group *group, size_t bytes);

/* Do all parts of a job at once, and return when all are over: AH_OK, or how one of them ended. A helper that could not be
 * started costs time, and nothing else: its part is done after the caller's own. */
int ah_run_parts(struct ah_group *group, ah_part_work work, const void *job, uint32_t parts);

/* Let the helper_threads go; no call runs. */
void ah_helper_threads_stop(struct ah_group *group);

#endif
