/* Copy-in/copy-out slots: where the chunk of a ticket is. */
#ifndef ALLHANDS_CICO_SLOT_H
#define ALLHANDS_CICO_SLOT_H

#include "shm/segment.h"

/* The chunk of a ticket in its rank's slot. Each time that a slot is reused the position advances by `step` bytes,
 * with room for `bytes`, until the ring length is reached. The steps of a call are the same on every rank. */
unsigned char *ah_cico_slot_at(const struct ah_group *group, uint32_t rank, uint32_t ticket, size_t step, size_t bytes);

#endif
