/* Sizes that only their sender knows: each rank states its largest when it begins, so that everyone takes the
 * same number of chunks, and writes what each other rank is to get at the head of its first slot, so that who
 * expects something else finds out before it copies. Beside the size stands where it is, for who can read it there. */
#ifndef ALLHANDS_SIZES_H
#define ALLHANDS_SIZES_H

#include "collectives/collective.h"

/* Bytes before what stands in a slot for a size and an address for each rank. */
size_t ah_part_table_bytes(const struct ah_group *group);

/* Where what `rank` has for the others stands, after its table: at most AH_CHUNK_BYTES. */
unsigned char *ah_slot_after_table(const struct ah_group *group, uint32_t rank, uint32_t ticket);

/* The bytes of the largest part: one for each rank, or with NULL `same` for all. */
size_t ah_largest_part(const struct ah_group *group, const struct ah_part *parts, struct ah_part same);

/* State these parts of the call that runs. Before arriving. */
void ah_write_part_table(struct ah_group *group, uint32_t first, const struct ah_part *parts, struct ah_part same);

/* After the meeting: where `rank` has what it part_entry for us. */
uint64_t ah_part_address(const struct ah_group *group, uint32_t first, uint32_t rank);

/* After the meeting: the largest size that any rank part_entry. */
size_t ah_largest_of_all(const struct ah_group *group);

/* After the meeting: whether some rank part_entry a size that is read where it stands, and so has copied nothing in. */
int ah_any_single_copy(const struct ah_group *group);

/* After the meeting: whether some rank has what it moves beside the call; whether some has not. Where ranks differ in it,
 * all goes through the slots. */
int ah_any_payload(const struct ah_group *group);
int ah_any_without_payload(const struct ah_group *group);

/* After the meeting: AH_MISMATCH (which ends the group) unless every rank has the bytes of its part for us. */
int ah_compare_part_sizes(struct ah_group *group, uint32_t first, const struct ah_part *parts);

/* After the meeting of an operation with a root: AH_MISMATCH unless what the root part_entry for each rank is what that
 * rank part_entry. Everyone looks at all of it, so that everyone finds out. `own` is what this rank has for itself. */
int ah_compare_root_sizes(struct ah_group *group, uint32_t first, uint32_t root, size_t own);

#endif
