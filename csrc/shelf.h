/* A shelf: where two ranks average values as they come, neither waiting for the other. Whoever has a piece of a value first lays a
 * copy on its part of the shelf, while it is still in a cache; the other one averages that with its own, in both places, and the
 * first takes the average when it comes by with the next value. What was not averaged by the end of a round is left to the ranks, who
 * agree on it without a word: see `ah_shelf_end`. */
#ifndef ALLHANDS_SHELF_H
#define ALLHANDS_SHELF_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum ah_shelf_state {
    AH_SHELF_NONE,  /* nothing came */
    AH_SHELF_OPEN,  /* ours is there, and nobody's lies on the shelf as far as we know */
    AH_SHELF_LAID,  /* ours lies on the shelf */
    AH_SHELF_DONE,  /* it is the average */
};

/* A part of a value, about as large as what fits into a core's own cache beside all else. */
struct ah_shelf_piece {
    unsigned char *data; /* ours, once it came */
    size_t bytes;
    size_t at;           /* where it lies on the shelf, once it is LAID */
    size_t value;        /* which value it is part of */
    uint32_t dtype;
    enum ah_shelf_state state;
};

struct ah_shelf {
    unsigned char *memory; /* of both ranks: a card for each piece, then each rank's part */
    struct ah_shelf_piece *pieces;
    size_t *firsts;        /* of each value: its first piece; one more for the end */
    size_t *open;          /* pieces that are OPEN or LAID, in the order in which they came */
    size_t values, number_open;
    size_t part;           /* bytes of a rank's part */
    size_t head, tail;     /* of what lies on ours, as if it had no end: it is laid and taken in order */
    uint32_t rank;
    uint32_t round;        /* both ranks end theirs together */
};

/* How many pieces there are of values of these sizes. */
size_t ah_shelf_pieces(const size_t *sizes, size_t values);

/* The shared memory that they need. */
size_t ah_shelf_bytes(const size_t *sizes, size_t values);

/* Make a shelf in `memory`, which is zeros when the ranks get it. 0, or -1 where there is no memory. */
int ah_shelf_make(struct ah_shelf *shelf, unsigned char *memory, const size_t *sizes, size_t values, uint32_t rank);

void ah_shelf_free(struct ah_shelf *shelf);

/* Bytes of value `index`. */
size_t ah_shelf_size(const struct ah_shelf *shelf, size_t index);

/* Our value `index` is there, once in a round at most, of that size. It must stay where it is until the round ends; until then it may be what it was
 * or the average, piece by piece. */
void ah_shelf_put(struct ah_shelf *shelf, size_t index, unsigned char *data, uint32_t dtype);

/* Average and take what is ready; how many pieces still wait for the other rank. */
size_t ah_shelf_settle(struct ah_shelf *shelf);

/* End the round. Between the last `put` of either rank and this, both must have met. Afterwards all values are averages but for those
 * in `left`, which are the same on both ranks; pieces of them may be averages. How many. */
size_t ah_shelf_end(struct ah_shelf *shelf, size_t *left);

#endif
