/* Sizes that only the sender knows. Each rank publishes its largest part, so that all ranks use the same number of
 * chunks, and writes a table of the sizes for each rank at the head of its first slot, so that a receiver that
 * expects another size finds out before it copies. The table also has addresses, for single copy. */
#ifndef ALLHANDS_PART_SIZES_H
#define ALLHANDS_PART_SIZES_H

#include "collectives/collective.h"

/* Bytes of the table at the head of a slot: a size and an address for each rank. */
size_t ah_part_table_bytes(const struct ah_group *group);

/* The data of `rank` after its table: at most AH_CHUNK_BYTES. */
unsigned char *ah_slot_after_table(const struct ah_group *group, uint32_t rank, uint32_t ticket);

/* Size of the largest part; with NULL all parts are `same`. */
size_t ah_largest_part(const struct ah_group *group, const struct ah_part *parts, struct ah_part same);

/* Write the table of the current call, before `arrived` is set. */
void ah_write_part_table(struct ah_group *group, uint32_t first, const struct ah_part *parts, struct ah_part same);

/* After the comparison: the address that `rank` published for us. */
uint64_t ah_part_address(const struct ah_group *group, uint32_t first, uint32_t rank);

/* After the comparison: the largest size that any rank published. */
size_t ah_largest_of_all(const struct ah_group *group);

/* After the comparison: whether a rank's part is read by single copy, so that it was not copied in. */
int ah_any_single_copy(const struct ah_group *group);

/* After the comparison: whether a rank has its data in its payload; whether one has not. If ranks differ, all data
 * goes through the slots. */
int ah_any_payload(const struct ah_group *group);
int ah_any_without_payload(const struct ah_group *group);

/* After the comparison: AH_MISMATCH (which ends the group) unless every rank's part for us has the expected size. */
int ah_compare_part_sizes(struct ah_group *group, uint32_t first, const struct ah_part *parts);

/* After the comparison of an operation with a root: AH_MISMATCH unless the root's size for each rank is the one that
 * the rank published. Every rank checks all of them, so all ranks find it. `own` is the size of this rank's part. */
int ah_compare_root_sizes(struct ah_group *group, uint32_t first, uint32_t root, size_t own);

#endif
