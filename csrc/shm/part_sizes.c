#include "shm/part_sizes.h"

#include "shm/fingerprint.h"
#include "shm/single_copy.h"
#include "shm/cico_slot.h"

struct stated {
    uint64_t bytes, address;
};

size_t ah_table_bytes(const struct ah_group *group)
{
    return (group->ranks * sizeof(struct stated) + AH_LINE - 1) / AH_LINE * AH_LINE;
}

/* From one table to the next: nobody knows yet what the others move. Less is better for small parts, more for large ones. */
#define STEP_BYTES ((size_t)128 << 10)

static unsigned char *table_at(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    return ah_slot_at(group, rank, ticket, STEP_BYTES + ah_table_bytes(group), ah_table_bytes(group) + AH_CHUNK_BYTES);
}

unsigned char *ah_parts_at(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    return table_at(group, rank, ticket) + ah_table_bytes(group);
}

size_t ah_largest_part(const struct ah_group *group, const struct ah_part *parts, struct ah_part same)
{
    size_t largest = parts ? 0 : same.bytes;

    for (uint32_t rank = 0; parts && rank < group->ranks; rank++)
        largest = parts[rank].bytes > largest ? parts[rank].bytes : largest;
    return largest;
}

void ah_state_parts(struct ah_group *group, uint32_t first, const struct ah_part *parts, struct ah_part same)
{
    struct stated *table = (struct stated *)table_at(group, group->rank, first);

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        struct ah_part part = parts ? parts[rank] : same;

        table[rank] = (struct stated){part.bytes, (uintptr_t)part.data};
    }
}

static size_t largest_of(const struct ah_group *group, uint32_t rank)
{
    return atomic_load_explicit(&group->members[rank].largest[group->call.sequence % AH_CALLS], memory_order_relaxed);
}

size_t ah_largest(const struct ah_group *group)
{
    size_t largest = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++)
        largest = largest_of(group, rank) > largest ? largest_of(group, rank) : largest;
    return largest;
}

int ah_someone_reaches(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_reaches(group, largest_of(group, rank)))
            return 1;
    }
    return 0;
}

/* What `from` stated for `to`. */
static const struct stated *stated(const struct ah_group *group, uint32_t first, uint32_t from, uint32_t to)
{
    return (const struct stated *)table_at(group, from, first) + to;
}

uint64_t ah_stated_address(const struct ah_group *group, uint32_t first, uint32_t rank)
{
    return stated(group, first, rank, group->rank)->address;
}

int ah_someone_beside(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_card_of(group, rank)->bytes != AH_LONG)
            return 1;
    }
    return 0;
}

int ah_someone_long(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_card_of(group, rank)->bytes == AH_LONG)
            return 1;
    }
    return 0;
}

int ah_check_sizes(struct ah_group *group, uint32_t first, const struct ah_part *parts)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (stated(group, first, rank, group->rank)->bytes != parts[rank].bytes)
            return ah_differ(group, rank);
    }
    return AH_OK;
}

int ah_check_root(struct ah_group *group, uint32_t first, uint32_t root, size_t own)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        uint64_t bytes = rank == group->rank ? own : stated(group, first, rank, root)->bytes;

        if (stated(group, first, root, rank)->bytes != bytes)
            return ah_differ(group, rank);
    }
    return AH_OK;
}
