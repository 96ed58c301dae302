#include "shm/cico_slot.h"

#include "collectives/collective.h"

/* Steps begin on a page of their own. */
#define STEP_BYTES ((size_t)4 << 10)

unsigned char *ah_cico_slot_at(const struct ah_group *group, uint32_t rank, uint32_t ticket, size_t step, size_t bytes)
{
    size_t each = step > 0 ? (step + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES : STEP_BYTES;
    size_t places = bytes < group->slot_bytes ? (group->slot_bytes - bytes) / each + 1 : 1;
    size_t turns = ah_min(group->ring_bytes / AH_SLOTS / each, places);

    return ah_slot(group, rank, ticket) + (turns > 1 ? ticket / AH_SLOTS % turns * each : 0);
}
