#include "sizes.h"

#include <string.h>

#include "wait.h"

size_t ah_table_bytes(const struct ah_group *group)
{
    return (group->ranks * sizeof(uint64_t) + AH_LINE - 1) / AH_LINE * AH_LINE;
}

void ah_state_sizes(struct ah_group *group, uint32_t first, const struct ah_part *sizes, size_t same)
{
    struct ah_member *self = &group->members[group->rank];
    unsigned char *table = ah_slot(group, group->rank, first);
    uint64_t largest = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        uint64_t bytes = sizes ? sizes[rank].bytes : same;

        memcpy(table + rank * sizeof bytes, &bytes, sizeof bytes);
        largest = bytes > largest ? bytes : largest;
    }
    atomic_store_explicit(&self->largest[group->call.sequence % AH_CALLS], largest, memory_order_relaxed);
}

size_t ah_largest(const struct ah_group *group)
{
    uint64_t largest = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        uint64_t theirs = atomic_load_explicit(&group->members[rank].largest[group->call.sequence % AH_CALLS],
                                               memory_order_relaxed);

        largest = theirs > largest ? theirs : largest;
    }
    return largest;
}

/* What `from` stated for `to`. */
static uint64_t stated(const struct ah_group *group, uint32_t first, uint32_t from, uint32_t to)
{
    uint64_t bytes;

    memcpy(&bytes, ah_slot(group, from, first) + to * sizeof bytes, sizeof bytes);
    return bytes;
}

static int mismatch(struct ah_group *group, uint32_t rank)
{
    ah_end(group, AH_MISMATCH, rank);
    group->culprit = rank;
    return AH_MISMATCH;
}

int ah_check_sizes(struct ah_group *group, uint32_t first, const struct ah_part *parts)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (stated(group, first, rank, group->rank) != parts[rank].bytes)
            return mismatch(group, rank);
    }
    return AH_OK;
}

int ah_check_root(struct ah_group *group, uint32_t first, uint32_t root, size_t own)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        uint64_t bytes = rank == group->rank ? own : stated(group, first, rank, root);

        if (stated(group, first, root, rank) != bytes)
            return mismatch(group, rank);
    }
    return AH_OK;
}
