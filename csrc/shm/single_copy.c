#define _GNU_SOURCE
#include "shm/single_copy.h"

#include <sys/uio.h>

#include "shm/wait.h"

/* Bytes per read, about a millisecond: the end of the group is checked in between. */
#define SOME_BYTES ((size_t)8 << 20)

int ah_single_copy_read(struct ah_group *group, uint32_t rank, void *to, uint64_t address, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t some = bytes - at < SOME_BYTES ? bytes - at : SOME_BYTES;
        struct iovec here = {.iov_base = (unsigned char *)to + at, .iov_len = some};
        struct iovec there = {.iov_base = (unsigned char *)(uintptr_t)address + at, .iov_len = some};
        ssize_t got = process_vm_readv(group->pids[rank], &here, 1, &there, 1, 0);
        int code = ah_group_status(group);

        if (code != AH_OK)
            return code;
        if (got <= 0)
            return AH_NOT_READ;
        at += (size_t)got;
    }
    return AH_OK;
}

int ah_single_copy_finish(struct ah_group *group, uint32_t ticket, int code)
{
    if (code == AH_NOT_READ)
        atomic_store_explicit(&group->members[group->rank].read_failed, 1, memory_order_relaxed);
    else if (code != AH_OK)
        return code;
    ah_counter_set(group, AH_REDUCED, ticket + 1);
    if ((code = ah_wait_all(group, AH_REDUCED, ticket + 1)) != AH_OK)
        return code;
    /* The flags are of this call: a later one begins with a comparison that this rank has not joined. */
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (atomic_load_explicit(&group->members[rank].read_failed, memory_order_relaxed) != 0)
            group->pids = NULL;
    }
    if (!group->pids)
        return AH_NOT_READ;
    group->single_copy_calls++;
    return AH_OK;
}
