/* Which core each rank is on. Ranks that run in lockstep wait for those that share a core, while another core has nothing to do. */
#ifndef ALLHANDS_CORE_H
#define ALLHANDS_CORE_H

#include "shm/segment.h"

/* Say which core we are on, and go to another where too many ranks are on this one. Nothing is pinned: the system may move us
 * again. Does nothing where there are more cores than ranks, as the system then finds a free one by itself. */
void ah_spread_out(struct ah_group *group);

#endif
