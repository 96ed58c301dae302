/* The operations, one file each. All ranks of the group call the same one with fitting arguments; each returns
 * an ah_outcome_code. Sizes are in bytes and may exceed 4 GiB. A negative timeout waits for ever. */
#ifndef ALLHANDS_COLLECTIVE_H
#define ALLHANDS_COLLECTIVE_H

#include "shm/segment.h"

/* A source for each rank; more ranks on one host are refused when the group is made. */
#define AH_MAX_RANKS 256

/* A tensor, or one of a list. */
struct ah_part {
    unsigned char *data;
    size_t bytes;
    const struct ah_window *window; /* where it lives, NULL for ordinary memory */
};

/* Tensors of one dtype that are handled as if they were contiguous; see tensor_list.h. */
struct ah_tensor_list {
    struct ah_part *parts;
    size_t *ends;  /* of each: its bytes and those of all before it */
    size_t number; /* at least one */
};

int ah_barrier(struct ah_group *group, int64_t timeout_ns);

/* A barrier that compares `call`, which another engine then performs; its sequence is filled in. */
int ah_compare_only(struct ah_group *group, const struct ah_call *call, int64_t timeout_ns);

int ah_all_reduce(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, int64_t timeout_ns);

/* The same for a tensor list; all ranks have tensors of the same sizes, in the same order. */
int ah_all_reduce_list(struct ah_group *group, struct ah_tensor_list tensors, uint32_t dtype, uint32_t reduction,
                         int64_t timeout_ns);

/* The result is in `data` of the root; that of the other ranks is not changed. */
int ah_reduce_to_root(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, uint32_t root,
                 int64_t timeout_ns);

int ah_broadcast(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns);

/* `out` has one part for each rank; parts may differ in size, and each must be as large as that rank's `in`. */
int ah_all_gather(struct ah_group *group, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                  int64_t timeout_ns);

/* As all_gather, to the root only; `out` is NULL elsewhere. */
int ah_gather(struct ah_group *group, struct ah_part in, const struct ah_part *out, uint32_t dtype, uint32_t root,
              int64_t timeout_ns);

/* Part r of the root's `in` is sent to rank r; `in` is NULL elsewhere. */
int ah_scatter(struct ah_group *group, const struct ah_part *in, struct ah_part out, uint32_t dtype, uint32_t root,
               int64_t timeout_ns);

/* Part r of all ranks' `in` is reduced to `out` of rank r; all parts are as large as `out`. */
int ah_reduce_scatter(struct ah_group *group, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                      uint32_t reduction, int64_t timeout_ns);

/* Part r of `in` is sent to rank r, part r of `out` is received from it; sizes may differ between pairs of ranks. */
int ah_all_to_all(struct ah_group *group, const struct ah_part *in, const struct ah_part *out, uint32_t dtype,
                  int64_t timeout_ns);

/* Shared by the operations ------------------------------------------------------------------------------- */

/* Tensors from this size on do not stay in the caches between two steps, so copies to them bypass the caches. */
#define AH_BYPASS_BYTES ((size_t)4 << 20)

/* Chunk size of large tensors: the buffers of both ranks stay in L2. Up to a whole slot is one chunk, because each
 * chunk costs two synchronisations. */
#define AH_CHUNK_BYTES ((size_t)512 << 10)

static inline size_t ah_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The bytes of chunk `index` out of `bytes`. */
static inline size_t ah_chunk_bytes(size_t bytes, size_t chunk, size_t index)
{
    size_t at = index * chunk;

    return at >= bytes ? 0 : ah_min(chunk, bytes - at);
}

/* Number of chunks in `bytes`: at least one, because every call must be compared. */
static inline size_t ah_chunk_count(size_t bytes, size_t chunk)
{
    return bytes <= chunk ? 1 : (bytes + chunk - 1) / chunk;
}

#endif
