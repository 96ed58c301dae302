#include "mpi/voyage.h"

#include <stdlib.h>
#include <string.h>

#include "shm/reduce.h"

/* All ranks' data together: up to this much everyone reduces everything, which saves a meeting. */
#define ONE_SHOT ((size_t)128 << 10)

/* The same where only the root does: 256 KiB of 2 ranks take 21 us and not 44, 64 KiB of 4 take 33 and not 55. */
#define ONE_SHOT_ROOT ((size_t)1 << 20)

/* What is reduced at a time: bytes of all ranks together, and of one at least. Measured with 2 ranks: less costs more
 * meetings, and more was no faster. */
#define BLOCK ((size_t)16 << 20)
#define LEAST_BLOCK ((size_t)64 << 10)

/* A line of the cache, in which whole elements of every type fit. */
#define LINE ((size_t)64)

/* Peers in turn, each rank beginning with another one, so that not all write to the same at once. */
static uint32_t peer_of(const struct ah_ferry *ferry, uint32_t turn, int sends)
{
    return (ferry->rank + (sends ? turn : ferry->ranks - turn)) % ferry->ranks;
}

static size_t block_of(const struct ah_ferry *ferry)
{
    size_t each = BLOCK / ferry->ranks;

    return (each > LEAST_BLOCK ? each : LEAST_BLOCK) / LINE * LINE;
}

/* Have room for `each` bytes of every rank. */
static int make_space(struct ah_ferry *ferry, size_t each)
{
    /* A line between rows: places that are a power of two apart drive each other out of the cache. */
    size_t bytes = ((each + LINE) * ferry->ranks + LINE - 1) / LINE * LINE;

    if (ferry->space_bytes >= bytes)
        return AH_OK;
    free(ferry->space);
    ferry->space = aligned_alloc(LINE, bytes);
    ferry->space_bytes = ferry->space ? bytes : 0;
    return ferry->space ? AH_OK : AH_INVALID;
}

static unsigned char *row(const struct ah_ferry *ferry, size_t each, uint32_t rank)
{
    return ferry->space + (each + LINE) * rank;
}

/* Reduce `bytes` of every rank, ours at `own` and the others' in their rows, into `out`. */
static void reduce(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *out, const unsigned char *own,
                   size_t each, size_t bytes)
{
    uint32_t dtype = trip->dtype & ~AH_COMPLEX;

    if (bytes == 0)
        return;
    for (uint32_t rank = 0; rank < ferry->ranks; rank++)
        ferry->rows[rank] = rank == ferry->rank ? own : row(ferry, each, rank);
    ah_reduce(dtype, trip->reduction, out, ferry->rows, ferry->ranks, bytes / ah_dtype_bytes(dtype));
}

/* What comes with the record ------------------------------------------------------------------------------ */

/* Whether the data of a call stands on the sheet. */
static int fits(const struct ah_trip *trip)
{
    return trip->bytes <= AH_RECORD_ROOM && !(trip->flags & AH_UNEVEN);
}

/* Exchange records with the data of everyone. */
static int meet(struct ah_ferry *ferry, const struct ah_trip *trip, const unsigned char *data, int64_t timeout_ns)
{
    struct ah_trip loaded = *trip;
    int code;

    loaded.with = trip->bytes;
    if (!ferry->under_way)
        memcpy(ferry->sheets[ferry->rank].room, data, trip->bytes);
    code = ah_ferry_depart(ferry, &loaded, timeout_ns);
    return code == AH_OK ? ah_ferry_compare(ferry, &loaded) : code;
}

static void reduce_sheets(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *out)
{
    uint32_t dtype = trip->dtype & ~AH_COMPLEX;

    if (trip->bytes == 0)
        return;
    for (uint32_t rank = 0; rank < ferry->ranks; rank++)
        ferry->rows[rank] = ferry->sheets[rank].room;
    ah_reduce(dtype, trip->reduction, out, ferry->rows, ferry->ranks, trip->bytes / ah_dtype_bytes(dtype));
}

int ah_voyage_barrier(struct ah_ferry *ferry, int64_t timeout_ns)
{
    const struct ah_trip trip = {.kind = AH_BARRIER, .root = -1};

    return ah_voyage_agree(ferry, &trip, timeout_ns);
}

int ah_voyage_agree(struct ah_ferry *ferry, const struct ah_trip *trip, int64_t timeout_ns)
{
    int code = ah_ferry_depart(ferry, trip, timeout_ns);

    if (code == AH_OK)
        code = ah_ferry_compare(ferry, trip);
    return ah_ferry_arrive(ferry, code);
}

/* Reductions ---------------------------------------------------------------------------------------------- */

/* Whether `rank` gets the result. */
static int gets(const struct ah_trip *trip, uint32_t rank)
{
    return trip->root < 0 || trip->root == (int32_t)rank;
}

/* Give everyone everything, to be reduced by each for itself. */
static int at_once(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data)
{
    int takes = gets(trip, ferry->rank), code = make_space(ferry, trip->bytes);

    for (uint32_t turn = 1; takes && code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 0);

        code = ah_ferry_receive(ferry, row(ferry, trip->bytes, peer), trip->bytes, peer);
    }
    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 1);

        if (gets(trip, peer))
            code = ah_ferry_send(ferry, data, trip->bytes, peer);
    }
    if (code == AH_OK)
        code = ah_ferry_compare(ferry, trip);
    if (code == AH_OK)
        code = ah_ferry_finish(ferry);
    if (code == AH_OK && takes)
        reduce(ferry, trip, data, data, trip->bytes, trip->bytes);
    return code;
}

/* The slice that `rank` reduces of the block at `at`. */
static struct ah_part slice(const struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data, size_t at,
                            uint32_t rank)
{
    size_t block = ah_min(block_of(ferry) * ferry->ranks, trip->bytes - at), lines = ferry->ranks * LINE;
    /* Whole lines, so that nobody writes to a line that another reads; the last rank has what is left. */
    size_t share = (block + lines - 1) / lines * LINE, low = ah_min(rank * share, block);

    return (struct ah_part){.data = data + at + low, .bytes = ah_min(low + share, block) - low};
}

/* Begin to give each rank its slice of a block, and to take ours of everyone's. */
static int hand_out(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data, size_t at, size_t each)
{
    size_t bytes = slice(ferry, trip, data, at, ferry->rank).bytes;
    int code = AH_OK;

    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 0);

        code = ah_ferry_receive(ferry, row(ferry, each, peer), bytes, peer);
    }
    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 1);
        struct ah_part part = slice(ferry, trip, data, at, peer);

        code = ah_ferry_send(ferry, part.data, part.bytes, peer);
    }
    return code;
}

/* Give our reduced slice to who gets the result, and begin to take everyone's. What was handed out must have gone
 * before its place is written to, but not before our slice goes: the others wait for that. */
static int hand_back(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data, size_t at,
                     struct ah_part mine)
{
    uint32_t before = ferry->going.count;
    int code = AH_OK;

    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 1);

        if (gets(trip, peer))
            code = ah_ferry_send(ferry, mine.data, mine.bytes, peer);
    }
    if (code == AH_OK)
        code = ah_ferry_finish_going(ferry, before);
    for (uint32_t turn = 1; gets(trip, ferry->rank) && code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 0);
        struct ah_part part = slice(ferry, trip, data, at, peer);

        code = ah_ferry_receive(ferry, part.data, part.bytes, peer);
    }
    return code;
}

/* Give each rank its slice of a block of everyone's data, to be reduced there and given back; the next block's slices
 * are on their way meanwhile. */
static int by_slices(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data)
{
    size_t step = block_of(ferry) * ferry->ranks, each = slice(ferry, trip, data, 0, 0).bytes;
    int code = make_space(ferry, each);

    if (code == AH_OK)
        code = hand_out(ferry, trip, data, 0, each);
    if (code == AH_OK)
        code = ah_ferry_compare(ferry, trip);
    for (size_t at = 0; code == AH_OK && at < trip->bytes; at += step) {
        struct ah_part mine = slice(ferry, trip, data, at, ferry->rank);
        unsigned char *own = mine.data;

        /* Where a rank keeps its tensor, the last block's result may still be on its way from the row. */
        code = gets(trip, ferry->rank) ? ah_ferry_finish_coming(ferry) : ah_ferry_finish(ferry);
        if (code != AH_OK)
            break;
        if (!gets(trip, ferry->rank))
            mine.data = row(ferry, each, ferry->rank);
        reduce(ferry, trip, mine.data, own, each, mine.bytes);
        code = hand_back(ferry, trip, data, at, mine);
        if (code == AH_OK && at + step < trip->bytes)
            code = hand_out(ferry, trip, data, at + step, each);
    }
    return code == AH_OK ? ah_ferry_finish(ferry) : code;
}

static int reduce_to(struct ah_ferry *ferry, const struct ah_trip *trip, unsigned char *data, int64_t timeout_ns)
{
    int code;

    if (fits(trip)) {
        code = meet(ferry, trip, data, timeout_ns);
        if (code == AH_OK && gets(trip, ferry->rank))
            reduce_sheets(ferry, trip, data);
        return ah_ferry_arrive(ferry, code);
    }
    code = ah_ferry_depart(ferry, trip, timeout_ns);
    if (code == AH_OK && trip->bytes * ferry->ranks <= (trip->root < 0 ? ONE_SHOT : ONE_SHOT_ROOT))
        code = at_once(ferry, trip, data);
    else if (code == AH_OK)
        code = by_slices(ferry, trip, data);
    return ah_ferry_arrive(ferry, code);
}

int ah_voyage_all_reduce(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t reduction,
                         int64_t timeout_ns)
{
    const struct ah_trip trip = {
        .kind = AH_ALL_REDUCE, .reduction = reduction, .dtype = dtype, .root = -1, .bytes = data.bytes};

    return reduce_to(ferry, &trip, data.data, timeout_ns);
}

int ah_voyage_reduce_to(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t reduction, uint32_t root,
                        int64_t timeout_ns)
{
    const struct ah_trip trip = {
        .kind = AH_REDUCE, .reduction = reduction, .dtype = dtype, .root = (int32_t)root, .bytes = data.bytes};

    return reduce_to(ferry, &trip, data.data, timeout_ns);
}

int ah_voyage_reduce_scatter(struct ah_ferry *ferry, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                             uint32_t reduction, int64_t timeout_ns)
{
    const struct ah_trip trip = {
        .kind = AH_REDUCE_SCATTER, .reduction = reduction, .dtype = dtype, .root = -1, .bytes = out.bytes};
    size_t each = ah_min(block_of(ferry), (out.bytes + LINE - 1) / LINE * LINE);
    int code = ah_ferry_depart(ferry, &trip, timeout_ns), compared = 0;

    if (code == AH_OK)
        code = make_space(ferry, each);
    for (size_t at = 0; code == AH_OK && at < out.bytes; at += each) {
        size_t bytes = ah_min(each, out.bytes - at);

        for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
            uint32_t peer = peer_of(ferry, turn, 0);

            code = ah_ferry_receive(ferry, row(ferry, each, peer), bytes, peer);
        }
        for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
            uint32_t peer = peer_of(ferry, turn, 1);

            code = ah_ferry_send(ferry, in[peer].data + at, bytes, peer);
        }
        if (code == AH_OK && !compared)
            code = ah_ferry_compare(ferry, &trip);
        compared = 1;
        if (code == AH_OK)
            code = ah_ferry_finish(ferry);
        if (code == AH_OK)
            reduce(ferry, &trip, out.data + at, in[ferry->rank].data + at, each, bytes);
    }
    if (code == AH_OK && !compared)
        code = ah_ferry_compare(ferry, &trip);
    return ah_ferry_arrive(ferry, code);
}

/* From tensor to tensor ----------------------------------------------------------------------------------- */

int ah_voyage_broadcast(struct ah_ferry *ferry, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns)
{
    const struct ah_trip trip = {.kind = AH_BROADCAST, .dtype = dtype, .root = (int32_t)root, .bytes = data.bytes};
    int few = ferry->ranks <= AH_FERRY_FEW, code;

    if (fits(&trip)) {
        code = meet(ferry, &trip, data.data, timeout_ns);
        if (code == AH_OK)
            memcpy(data.data, ferry->sheets[root].room, data.bytes);
        return ah_ferry_arrive(ferry, code);
    }
    code = ah_ferry_depart(ferry, &trip, timeout_ns);
    if (few && ferry->rank != root && code == AH_OK)
        code = ah_ferry_receive(ferry, data.data, data.bytes, root);
    for (uint32_t turn = 1; few && ferry->rank == root && code == AH_OK && turn < ferry->ranks; turn++)
        code = ah_ferry_send(ferry, data.data, data.bytes, peer_of(ferry, turn, 1));
    if (code == AH_OK)
        code = ah_ferry_compare(ferry, &trip);
    if (!few && code == AH_OK)
        code = ah_ferry_broadcast(ferry, data.data, data.bytes, root);
    if (code == AH_OK)
        code = ah_ferry_finish(ferry);
    return ah_ferry_arrive(ferry, code);
}

/* Give each rank its part and take each rank's; `trip` says which. */
static int exchange(struct ah_ferry *ferry, const struct ah_trip *trip, int64_t timeout_ns)
{
    const struct ah_part *mine = &trip->gives[ferry->rank], *room = &trip->takes[ferry->rank];
    int code = ah_ferry_depart(ferry, trip, timeout_ns);

    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 0);

        code = ah_ferry_receive(ferry, trip->takes[peer].data, trip->takes[peer].bytes, peer);
    }
    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        uint32_t peer = peer_of(ferry, turn, 1);

        code = ah_ferry_send(ferry, trip->gives[peer].data, trip->gives[peer].bytes, peer);
    }
    if (code == AH_OK && mine->data != room->data)
        memmove(room->data, mine->data, ah_min(mine->bytes, room->bytes));
    if (code == AH_OK)
        code = ah_ferry_compare(ferry, trip);
    if (code == AH_OK)
        code = ah_ferry_finish(ferry);
    return ah_ferry_arrive(ferry, code);
}

/* Whether parts are of other sizes than `bytes`. */
static uint32_t unevenness(const struct ah_ferry *ferry, const struct ah_part *parts, size_t bytes)
{
    for (uint32_t rank = 0; parts && rank < ferry->ranks; rank++) {
        if (parts[rank].bytes != bytes)
            return AH_UNEVEN;
    }
    return 0;
}

/* `part` for each rank (`root` is -1) or for the root alone, as what is given or taken. */
static struct ah_part *repeat(const struct ah_ferry *ferry, struct ah_part part, int64_t root)
{
    struct ah_part *parts = calloc(ferry->ranks, sizeof *parts);

    for (uint32_t rank = 0; parts && rank < ferry->ranks; rank++)
        parts[rank] = (struct ah_part){.data = part.data, .bytes = root < 0 || root == rank ? part.bytes : 0};
    return parts;
}

int ah_voyage_all_gather(struct ah_ferry *ferry, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                         int64_t timeout_ns)
{
    struct ah_trip trip = {.kind = AH_ALL_GATHER, .dtype = dtype, .root = -1, .bytes = in.bytes, .takes = out};
    struct ah_part *gives;
    int code;

    trip.flags = unevenness(ferry, out, in.bytes);
    if (fits(&trip)) {
        code = meet(ferry, &trip, in.data, timeout_ns);
        for (uint32_t rank = 0; code == AH_OK && rank < ferry->ranks; rank++)
            memcpy(out[rank].data, ferry->sheets[rank].room, in.bytes);
        return ah_ferry_arrive(ferry, code);
    }
    gives = repeat(ferry, in, -1);
    trip.gives = gives;
    code = gives ? exchange(ferry, &trip, timeout_ns) : AH_INVALID;
    free(gives);
    return code;
}

int ah_voyage_gather(struct ah_ferry *ferry, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                     uint32_t root, int64_t timeout_ns)
{
    struct ah_trip trip = {.kind = AH_GATHER, .dtype = dtype, .root = (int32_t)root, .bytes = in.bytes};
    struct ah_part *gives = repeat(ferry, in, root), *none = repeat(ferry, (struct ah_part){.data = in.data}, -1);
    int code;

    trip.flags = unevenness(ferry, out, in.bytes);
    trip.gives = gives;
    trip.takes = out ? out : none;
    code = gives && none ? exchange(ferry, &trip, timeout_ns) : AH_INVALID;
    free(gives);
    free(none);
    return code;
}

int ah_voyage_scatter(struct ah_ferry *ferry, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                      uint32_t root, int64_t timeout_ns)
{
    struct ah_trip trip = {.kind = AH_SCATTER, .dtype = dtype, .root = (int32_t)root, .bytes = out.bytes};
    struct ah_part *takes = repeat(ferry, out, root), *none = repeat(ferry, (struct ah_part){.data = out.data}, -1);
    int code;

    trip.flags = unevenness(ferry, in, out.bytes);
    trip.gives = in ? in : none;
    trip.takes = takes;
    code = takes && none ? exchange(ferry, &trip, timeout_ns) : AH_INVALID;
    free(takes);
    free(none);
    return code;
}

int ah_voyage_all_to_all(struct ah_ferry *ferry, const struct ah_part *in, const struct ah_part *out, uint32_t dtype,
                         int64_t timeout_ns)
{
    struct ah_trip trip = {.kind = AH_ALL_TO_ALL, .dtype = dtype, .root = -1, .gives = in, .takes = out};

    for (uint32_t rank = 0; rank < ferry->ranks; rank++) {
        trip.bytes = in[rank].bytes > trip.bytes ? in[rank].bytes : trip.bytes;
        trip.bytes = out[rank].bytes > trip.bytes ? out[rank].bytes : trip.bytes;
    }
    trip.flags = unevenness(ferry, in, trip.bytes) | unevenness(ferry, out, trip.bytes);
    return exchange(ferry, &trip, timeout_ns);
}
