/* Helper threads of a rank, for large calls on machines with spare cores: one core uses about a quarter of a common
 * machine's memory bandwidth. The threads of a rank split the tensor; each works with the same helper of the other
 * ranks, in counters and slots of its own. The order of reduction does not depend on their number. */
#ifndef ALLHANDS_HELPER_THREADS_H
#define ALLHANDS_HELPER_THREADS_H

#include "shm/segment.h"

/* Performs part number `part` of `parts` of a call, in the group as `view` sees it. Part 0 is the caller's, in the
 * group itself. */
typedef int (*ah_part_work)(struct ah_group *view, const void *job, uint32_t part, uint32_t parts);

/* Number of parts for a call of `bytes`: the same on every rank. */
uint32_t ah_part_count(const struct ah_group *group, size_t bytes);

/* Perform all parts of a job concurrently and return when all have ended: AH_OK, or the outcome of one that failed. The
 * part of a helper that could not be started is performed by the caller, after its own. */
int ah_run_parts(struct ah_group *group, ah_part_work work, const void *job, uint32_t parts);

/* End the threads; no call may run. */
void ah_helper_threads_stop(struct ah_group *group);

#endif
