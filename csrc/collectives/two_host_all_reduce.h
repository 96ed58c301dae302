/* all_reduce over two hosts with as many ranks each: shared memory inside a host, a connection for each rank. */
#ifndef ALLHANDS_RAIL_H
#define ALLHANDS_RAIL_H

#include "collectives/collective.h"

/* A connection to the rank on the other host that has our place there. Nobody else uses it meanwhile. */
struct ah_rail {
    int fd;
    int first;      /* whether our host is the first of the two: sums go in the order of hosts */
    uint32_t ranks; /* of both hosts together */
};

/* Reduce `data`, which must have as many elements for each rank of the host, over both hosts. A code that is about our
 * own rank is about the other end: AH_TIMEOUT, AH_DEAD (the connection ended). */
int ah_cross(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, struct ah_rail rail,
             int64_t timeout_ns);

#endif
