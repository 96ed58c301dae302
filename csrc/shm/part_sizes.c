#include "shm/part_sizes.h"

#include "shm/fingerprint.h"
#include "shm/single_copy.h"
#include "shm/cico_slot.h"

struct part_entry {
    uint64_t bytes, address;
};

size_t ah_part_table_bytes(const struct ah_group *group)
{
    return (group->ranks * sizeof(struct part_entry) + AH_ALIGN - 1) / AH_ALIGN * AH_ALIGN;
}

/* Step of the rotation in a slot (cico_slot.h): a constant, because the sizes of other ranks are not known yet. A
 * smaller one is better for small parts, a larger one for large parts. */
#define STEP_BYTES ((size_t)128 << 10)

static unsigned char *table_at(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    size_t table = ah_part_table_bytes(group);

    return ah_cico_slot_at(group, rank, ticket, STEP_BYTES + table, table + AH_CHUNK_BYTES);
}

unsigned char *ah_slot_after_table(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    return table_at(group, rank, ticket) + ah_part_table_bytes(group);
}

size_t ah_largest_part(const struct ah_group *group, const struct ah_part *parts, struct ah_part same)
{
    size_t largest = parts ? 0 : same.bytes;

    for (uint32_t rank = 0; parts && rank < group->ranks; rank++)
        largest = parts[rank].bytes > largest ? parts[rank].bytes : largest;
    return largest;
}

void ah_write_part_table(struct ah_group *group, uint32_t first, const struct ah_part *parts, struct ah_part same)
{
    struct part_entry *table = (struct part_entry *)table_at(group, group->rank, first);

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        struct ah_part part = parts ? parts[rank] : same;

        table[rank] = (struct part_entry){part.bytes, (uintptr_t)part.data};
    }
}

static size_t largest_of(const struct ah_group *group, uint32_t rank)
{
    return atomic_load_explicit(&group->members[rank].largest[group->call.sequence % AH_CALL_DEPTH],
                                memory_order_relaxed);
}

size_t ah_largest_of_all(const struct ah_group *group)
{
    size_t largest = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++)
        largest = largest_of(group, rank) > largest ? largest_of(group, rank) : largest;
    return largest;
}

int ah_any_single_copy(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_uses_single_copy(group, largest_of(group, rank)))
            return 1;
    }
    return 0;
}

/* The entry of `from` for `to`. */
static const struct part_entry *part_entry(const struct ah_group *group, uint32_t first, uint32_t from, uint32_t to)
{
    return (const struct part_entry *)table_at(group, from, first) + to;
}

uint64_t ah_part_address(const struct ah_group *group, uint32_t first, uint32_t rank)
{
    return part_entry(group, first, rank, group->rank)->address;
}

int ah_any_payload(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_fingerprint_of(group, rank)->bytes != AH_NO_PAYLOAD)
            return 1;
    }
    return 0;
}

int ah_any_without_payload(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (ah_fingerprint_of(group, rank)->bytes == AH_NO_PAYLOAD)
            return 1;
    }
    return 0;
}

int ah_compare_part_sizes(struct ah_group *group, uint32_t first, const struct ah_part *parts)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (part_entry(group, first, rank, group->rank)->bytes != parts[rank].bytes)
            return ah_call_mismatch(group, rank);
    }
    return AH_OK;
}

int ah_compare_root_sizes(struct ah_group *group, uint32_t first, uint32_t root, size_t own)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        uint64_t bytes = rank == group->rank ? own : part_entry(group, first, rank, root)->bytes;

        if (part_entry(group, first, root, rank)->bytes != bytes)
            return ah_call_mismatch(group, rank);
    }
    return AH_OK;
}
