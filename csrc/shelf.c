#include "shelf.h"

#include <stdlib.h>
#include <string.h>

#include "collective.h"
#include "copy.h"
#include "reduce.h"
#include "wait.h"

/* Small enough for two ranks to share the work on one value, and for what is done with a piece to find it in a core's own cache. */
#define PIECE_BYTES ((size_t)128 << 10)

/* What a rank may have on the shelf at a time: half of all, or within these all of it or the most. With more, lines are written anew
 * that have gone out of the caches, and it is memory. */
#define LEAST_PART ((size_t)2 << 20)
#define MOST_PART ((size_t)4 << 20)

/* How many pieces may still wait until one stops to look for others that do not, with more values to come: those that came first are
 * ready first. */
#define MOST_WAITING 8

#define LINE ((size_t)64)

/* What stands in the word of a piece: four times the round, and this. It is FREE for a round once whoever laid something in the last
 * one has set it so; until then the piece is left to the end. */
enum { FREE, LAYING, LAID, AVERAGE, STATES };

/* Of each piece, on a cache line of its own. */
struct card {
    _Atomic uint32_t word;
    uint64_t at; /* where it lies, from LAID on */
};

static struct card *card_of(const struct ah_shelf *shelf, size_t piece)
{
    return (struct card *)(void *)(shelf->memory + piece * LINE);
}

static uint32_t read_word(const struct ah_shelf *shelf, size_t piece)
{
    return atomic_load_explicit(&card_of(shelf, piece)->word, memory_order_acquire);
}

static void write_word(const struct ah_shelf *shelf, size_t piece, uint32_t round, uint32_t state)
{
    atomic_store_explicit(&card_of(shelf, piece)->word, round * STATES + state, memory_order_release);
}

static size_t in_lines(size_t bytes)
{
    return (bytes + LINE - 1) / LINE * LINE;
}

size_t ah_shelf_pieces(const size_t *sizes, size_t values)
{
    size_t pieces = 0;

    for (size_t index = 0; index < values; index++)
        pieces += (sizes[index] + PIECE_BYTES - 1) / PIECE_BYTES;
    return pieces;
}

/* Bytes of a rank's part. */
static size_t part_of(const size_t *sizes, size_t values)
{
    size_t total = 0, half;

    for (size_t index = 0; index < values; index++)
        total += in_lines(sizes[index]);
    half = in_lines(total / 2);
    if (half > MOST_PART)
        return MOST_PART;
    return half > LEAST_PART ? half : ah_min(total, LEAST_PART);
}

size_t ah_shelf_bytes(const size_t *sizes, size_t values)
{
    return ah_shelf_pieces(sizes, values) * LINE + 2 * part_of(sizes, values);
}

int ah_shelf_make(struct ah_shelf *shelf, unsigned char *memory, const size_t *sizes, size_t values, uint32_t rank)
{
    size_t pieces = ah_shelf_pieces(sizes, values), at = 0;

    *shelf = (struct ah_shelf){.memory = memory, .values = values, .part = part_of(sizes, values), .rank = rank};
    shelf->pieces = calloc(pieces + 1, sizeof *shelf->pieces);
    shelf->firsts = calloc(values + 1, sizeof *shelf->firsts);
    shelf->open = calloc(pieces + 1, sizeof *shelf->open);
    if (!shelf->pieces || !shelf->firsts || !shelf->open) {
        ah_shelf_free(shelf);
        return -1;
    }
    for (size_t index = 0; index < values; index++) {
        shelf->firsts[index] = at;
        for (size_t done = 0; done < sizes[index]; done += PIECE_BYTES, at++) {
            size_t rest = sizes[index] - done;

            shelf->pieces[at].bytes = rest < PIECE_BYTES ? rest : PIECE_BYTES;
            shelf->pieces[at].value = index;
        }
    }
    shelf->firsts[values] = at;
    return 0;
}

void ah_shelf_free(struct ah_shelf *shelf)
{
    free(shelf->pieces);
    free(shelf->firsts);
    free(shelf->open);
    *shelf = (struct ah_shelf){0};
}

static unsigned char *place(const struct ah_shelf *shelf, uint32_t rank, size_t at)
{
    return shelf->memory + shelf->firsts[shelf->values] * LINE + rank * shelf->part + at;
}

/* Room for a piece on our part, in one place; -1 where there is none now. */
static int make_room(struct ah_shelf *shelf, size_t bytes, size_t *at)
{
    size_t start = shelf->head % shelf->part, skip = shelf->part - start < bytes ? shelf->part - start : 0;

    if (shelf->head + skip + bytes - shelf->tail > shelf->part)
        return -1;
    shelf->head += skip;
    *at = shelf->head % shelf->part;
    shelf->head += bytes;
    return 0;
}

/* Lay a piece on our part, unless the other has it already or there is no room. */
static void lay(struct ah_shelf *shelf, size_t index)
{
    struct ah_shelf_piece *piece = &shelf->pieces[index];
    uint32_t base = shelf->round * STATES, found = base + FREE;
    size_t head = shelf->head;

    if (read_word(shelf, index) != found || make_room(shelf, in_lines(piece->bytes), &piece->at) != 0)
        return;
    if (!atomic_compare_exchange_strong_explicit(&card_of(shelf, index)->word, &found, base + LAYING, memory_order_acquire,
                                                 memory_order_relaxed)) {
        shelf->head = head;
        return;
    }
    ah_copy(place(shelf, shelf->rank, piece->at), piece->data, piece->bytes, 0);
    card_of(shelf, index)->at = piece->at;
    write_word(shelf, index, shelf->round, LAID);
    piece->state = AH_SHELF_LAID;
}

/* Ours and the other's, which lies there: the average goes to both places. The order is that of the ranks, as everywhere. */
static void average(struct ah_shelf *shelf, size_t index)
{
    struct ah_shelf_piece *piece = &shelf->pieces[index];
    unsigned char *theirs = place(shelf, 1 - shelf->rank, card_of(shelf, index)->at);
    const void *sources[2] = {shelf->rank == 0 ? piece->data : theirs, shelf->rank == 0 ? theirs : piece->data};

    ah_reduce_twice(piece->dtype, AH_AVG, piece->data, theirs, sources, 2, piece->bytes / ah_dtype_bytes(piece->dtype));
    write_word(shelf, index, shelf->round, AVERAGE);
    piece->state = AH_SHELF_DONE;
}

/* Take the average of what we laid. */
static void take(struct ah_shelf *shelf, size_t index)
{
    struct ah_shelf_piece *piece = &shelf->pieces[index];

    ah_copy(piece->data, place(shelf, shelf->rank, piece->at), piece->bytes, 0);
    write_word(shelf, index, shelf->round + 1, FREE);
    piece->state = AH_SHELF_DONE;
}

/* The oldest piece that lies on our part: what was laid before it is free. */
static void move_tail(struct ah_shelf *shelf)
{
    size_t start = shelf->head % shelf->part;

    shelf->tail = shelf->head;
    for (size_t each = 0; each < shelf->number_open; each++) {
        const struct ah_shelf_piece *piece = &shelf->pieces[shelf->open[each]];

        if (piece->state == AH_SHELF_LAID) {
            shelf->tail -= start > piece->at ? start - piece->at : start + shelf->part - piece->at;
            return;
        }
    }
}

/* Average and take what is ready, until `most` were not; how many pieces still wait. */
static size_t settle(struct ah_shelf *shelf, size_t most)
{
    uint32_t base = shelf->round * STATES;
    size_t kept = 0, each = 0;

    for (; each < shelf->number_open && kept < most; each++) {
        size_t index = shelf->open[each];
        struct ah_shelf_piece *piece = &shelf->pieces[index];
        uint32_t found = read_word(shelf, index);

        if (piece->state == AH_SHELF_LAID && found == base + AVERAGE)
            take(shelf, index);
        else if (piece->state == AH_SHELF_OPEN && found == base + LAID)
            average(shelf, index);
        if (piece->state != AH_SHELF_DONE)
            shelf->open[kept++] = index;
    }
    if (kept < each) {
        memmove(shelf->open + kept, shelf->open + each, (shelf->number_open - each) * sizeof *shelf->open);
        shelf->number_open -= each - kept;
        move_tail(shelf);
    }
    return shelf->number_open;
}

size_t ah_shelf_settle(struct ah_shelf *shelf)
{
    return settle(shelf, SIZE_MAX);
}

size_t ah_shelf_size(const struct ah_shelf *shelf, size_t index)
{
    size_t bytes = 0;

    for (size_t each = shelf->firsts[index]; each < shelf->firsts[index + 1]; each++)
        bytes += shelf->pieces[each].bytes;
    return bytes;
}

void ah_shelf_put(struct ah_shelf *shelf, size_t index, unsigned char *data, uint32_t dtype)
{
    for (size_t each = shelf->firsts[index]; each < shelf->firsts[index + 1]; each++) {
        struct ah_shelf_piece *piece = &shelf->pieces[each];

        piece->data = data;
        piece->dtype = dtype;
        piece->state = AH_SHELF_OPEN;
        data += piece->bytes;
        if (read_word(shelf, each) == shelf->round * STATES + LAID)
            average(shelf, each);
        else {
            lay(shelf, each);
            shelf->open[shelf->number_open++] = each;
        }
        settle(shelf, MOST_WAITING);
    }
}

/* After both have met, nobody lays or averages any more in this round. So a piece is left exactly if we did not average it and it is not
 * the average of what we laid: what the other knows of it is the same. Whoever laid something sets its word free; where nobody did,
 * rank 0 does, and the other does not look at it before its next round. */
size_t ah_shelf_end(struct ah_shelf *shelf, size_t *left)
{
    uint32_t base = shelf->round * STATES;
    size_t number = 0;

    for (size_t index = 0; index < shelf->firsts[shelf->values]; index++) {
        struct ah_shelf_piece *piece = &shelf->pieces[index];
        uint32_t found = piece->state == AH_SHELF_DONE ? 0 : read_word(shelf, index);

        if (piece->state == AH_SHELF_LAID && found == base + AVERAGE)
            take(shelf, index);
        else if (piece->state == AH_SHELF_LAID || (piece->state != AH_SHELF_DONE && shelf->rank == 0 && found == base + FREE))
            write_word(shelf, index, shelf->round + 1, FREE);
        if (piece->state != AH_SHELF_DONE && (number == 0 || left[number - 1] != piece->value))
            left[number++] = piece->value;
        piece->state = AH_SHELF_NONE;
        piece->data = NULL;
    }
    shelf->number_open = 0;
    shelf->head = shelf->tail = 0;
    shelf->round++;
    return number;
}
