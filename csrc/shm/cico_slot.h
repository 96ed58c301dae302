/* The slots of the ranks: where the chunk of a ticket stands. */
#ifndef ALLHANDS_SLOT_H
#define ALLHANDS_SLOT_H

#include "shm/segment.h"

/* Where in its slot the chunk of a ticket stands, on every rank: a step of `step` bytes further each time that the slot comes
 * round, with reusable for `bytes`, until the ring is as long as it is to be. The steps of a call are the same on every rank. */
unsigned char *ah_cico_slot_at(const struct ah_group *group, uint32_t rank, uint32_t ticket, size_t step, size_t bytes);

#endif
