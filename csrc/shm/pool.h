/* A pool: where the results of a reduction are kept once for all ranks, which then copy nothing out and hold no copy of their own. A rank
 * sees the results in memory that is its own as soon as it writes there: what one rank does to them no other rank sees.
 *
 * Results go to the pool in a call for which every rank has said that it is done with those of the last one, and go as ever in one for which
 * some rank has not: all know which it is once they have met. A rank is done with them when nobody there holds one any more, and
 * no page has become its own: where one has, its new content would be hidden.
 *
 *   a line for each rank | the results, each on lines of its own */
#ifndef ALLHANDS_POOL_H
#define ALLHANDS_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/collective.h"

/* The results as one rank sees them. Lives until the last of them is let go of. */
struct ah_pool_view {
    _Atomic size_t holders; /* the pool itself, and one for each result that somebody has */
    unsigned char *memory;
    size_t bytes;
    void *attached; /* freed with it; NULL for nothing */
};

struct ah_pool {
    unsigned char *memory; /* of all ranks */
    size_t bytes;          /* all of it */
    size_t at;             /* where the results begin */
    struct ah_bundle into; /* where each result goes */
    struct ah_pool_view *view;
    uint32_t rank, ranks;
    int pages;             /* descriptor: which page of this process is what; see pagemap(5) */
    int offered;           /* whether the results of the next call may go there */
    int filled;            /* whether those of the last call did */
    uint64_t cell[2];      /* our own; what has its last tensor here is meant for this pool */
    struct ah_pool *next;  /* of the same group */
};

/* The shared memory that results of these sizes need, the last of which is that of the tensor in the cell. */
size_t ah_pool_bytes(const size_t *sizes, size_t number, uint32_t ranks);

/* Map a pool from a file of `ah_pool_bytes` zeros. 0, or an errno. */
int ah_pool_make(struct ah_pool *pool, int fd, const size_t *sizes, size_t number, uint32_t rank, uint32_t ranks);

/* Results that somebody has stay where they are, and the cell. */
void ah_pool_free(struct ah_pool *pool);

/* Whether `bundle` is meant for this pool: its last tensor is in our cell, and all have the sizes of the results. That last one has its
 * result as ever; the others stay as they are where results go to the pool. */
int ah_pool_fits(const struct ah_pool *pool, const struct ah_bundle *bundle);

/* Where result `index` is for this rank. */
unsigned char *ah_pool_result(const struct ah_pool *pool, size_t index);

/* Whether nobody has a result of the last call. */
int ah_pool_is_free(const struct ah_pool *pool);

/* Once it is free: whether nobody has written to the results. What was written is gone then. -1 where the kernel does not say. */
int ah_pool_is_clean(const struct ah_pool *pool);

void ah_pool_hold(struct ah_pool_view *view);
void ah_pool_release(struct ah_pool_view *view);

/* Say, before the meeting of call number `sequence`, that its results may go here, if they were offered a place. */
void ah_pool_announce(struct ah_pool *pool, uint64_t sequence);

/* After the meeting: whether every rank has said so. */
int ah_pool_agreed(const struct ah_pool *pool, uint64_t sequence);

#endif
