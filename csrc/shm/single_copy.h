/* Single copy: read a tensor from its owner's process with process_vm_readv, where slots need two copies.
 *
 * Containers and hardened kernels may forbid it. The first call tries; at its end all ranks publish whether it
 * worked, and if it failed for one, all repeat that call through the slots and none tries again. Memory is only read:
 * a reused pid could yield wrong data only in a call that fails anyway, because the owner is dead. */
#ifndef ALLHANDS_SINGLE_COPY_H
#define ALLHANDS_SINGLE_COPY_H

#include "shm/segment.h"

/* Not an ah_outcome_code: a rank could not read, and all ranks know it. */
#define AH_NOT_READ (-1)

/* Below this a second copy is cheaper than pinning the peer's pages and the final synchronisation (all_to_all of
 * parts of 64 KiB: 40 to 53 us against 60 to 75 with 4 ranks, 8 against 11 to 12 with 2). */
#define AH_SINGLE_COPY_FROM ((size_t)48 << 10)

/* From this size on slots are faster: they stay in cache, and copies out of them bypass it, which the kernel's do not
 * (all_gather of 32 MiB from each of 2 ranks: 7.1 against 9.9 ms). */
#define AH_SINGLE_COPY_BELOW ((size_t)16 << 20)

/* Whether a part of `bytes` is read from the owner's process. Not with a victim L3, where two copies are faster
 * (all_gather of 1 MiB from each of 2 ranks: 87 against 133 us, all_to_all of parts of 512 KiB: 50 against 72;
 * without one 277 against 210, and 182 against 119). */
static inline int ah_uses_single_copy(const struct ah_group *group, size_t bytes)
{
    return group->pids && !group->victim_l3 && bytes >= AH_SINGLE_COPY_FROM && bytes < AH_SINGLE_COPY_BELOW;
}

/* Copy `bytes` from `address` in the process of `rank`: AH_OK, AH_NOT_READ, or the group's outcome. */
int ah_single_copy_read(struct ah_group *group, uint32_t rank, void *to, uint64_t address, size_t bytes);

/* Publish how reading went in the call whose first chunk has `ticket`, and wait for all ranks. AH_OK: all ranks have
 * their data, and the sources may change. AH_NOT_READ: no rank may use what it read. */
int ah_single_copy_finish(struct ah_group *group, uint32_t ticket, int code);

#endif
