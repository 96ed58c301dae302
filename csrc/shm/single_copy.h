/* Reading a tensor where it stands in its owner's process: the kernel copies it once, where the slots take two copies.
 *
 * Nobody asks beforehand whether the kernel allows it (containers and hardened kernels may not): the first call tries,
 * everyone says at its end whether it could, and if one could not, all do that call through the slots and none tries
 * again. Memory is only ever read: a number that meanwhile means another process could cost a wrong copy in a call that
 * fails anyway, because its owner is dead, and never another's data. */
#ifndef ALLHANDS_REACH_H
#define ALLHANDS_REACH_H

#include "shm/segment.h"

/* Not an ah_outcome_code: someone could not read, and everyone knows. */
#define AH_NOT_READ (-1)

/* Below this a second copy costs less than the kernel's look at the other's pages and the meeting at the end (all_to_all of
 * parts of 64 KiB: 40 to 53 us against 60 to 75 with 4 ranks, 8 against 11 to 12 with 2). */
#define AH_SINGLE_COPY_FROM ((size_t)48 << 10)

/* From this on slots are faster: they stay in the cache, and copies out of them go past it, which the kernel's do not
 * (all_gather of 32 MiB from each of 2 ranks: 7.1 against 9.9 ms). */
#define AH_SINGLE_COPY_BELOW ((size_t)16 << 20)

/* Whether a part of `bytes` is read where it stands, so that its owner does not copy it in. Not where slots are victim_l3: two copies by
 * facts of them take less there (all_gather of 1 MiB from each of 2 ranks: 87 against 133 us, all_to_all of parts of 512 KiB: 50 against
 * 72; where they are not, 277 against 210 us, and 182 against 119). */
static inline int ah_uses_single_copy(const struct ah_group *group, size_t bytes)
{
    return group->pids && !group->victim_l3 && bytes >= AH_SINGLE_COPY_FROM && bytes < AH_SINGLE_COPY_BELOW;
}

/* Copy `bytes` from `address` in the process of `rank`: AH_OK, AH_NOT_READ, or how the group ended meanwhile. */
int ah_single_copy_read(struct ah_group *group, uint32_t rank, void *to, uint64_t address, size_t bytes);

/* Say how reading went in the call whose first chunk has `ticket`, and wait until everyone has. AH_OK: everyone has what
 * it wanted, and what was read may change. AH_NOT_READ: nobody may rely on what was read. */
int ah_single_copy_finish(struct ah_group *group, uint32_t ticket, int code);

#endif
