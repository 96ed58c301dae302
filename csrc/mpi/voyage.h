/* The collectives of a group over MPI, as those of collective.h are for shared memory. Each returns an ah_outcome_code. */
#ifndef ALLHANDS_VOYAGE_H
#define ALLHANDS_VOYAGE_H

#include "mpi/ferry.h"

int ah_voyage_barrier(struct ah_ferry *ferry, int64_t timeout_ns);

/* Compare a call that is then done by other means, or refused (AH_REFUSED in its flags). */
int ah_voyage_agree(struct ah_ferry *ferry, const struct ah_trip *trip, int64_t timeout_ns);

int ah_voyage_all_reduce(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t reduction,
                         int64_t timeout_ns);

int ah_voyage_reduce_to(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t reduction, uint32_t root,
                        int64_t timeout_ns);

int ah_voyage_broadcast(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns);

int ah_voyage_all_gather(struct ah_ferry *ferry, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                         int64_t timeout_ns);

int ah_voyage_gather(struct ah_ferry *ferry, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                     uint32_t root, int64_t timeout_ns);

int ah_voyage_scatter(struct ah_ferry *ferry, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                      uint32_t root, int64_t timeout_ns);

int ah_voyage_reduce_scatter(struct ah_ferry *ferry, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                             uint32_t reduction, int64_t timeout_ns);

int ah_voyage_all_to_all(struct ah_ferry *ferry, const struct ah_part *in, const struct ah_part *out, uint32_t dtype,
                         int64_t timeout_ns);

#endif
