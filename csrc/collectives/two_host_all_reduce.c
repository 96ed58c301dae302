/* Piece by piece: reduce_scatter inside the host gives each rank its slice of the host's sum, which it sends across; to
 * it is added what comes from there, which is the other host's sum of the same slice; all_gather gives the slices to
 * everyone on the host. While a slice is on its way, the next piece is reduced. Bytes of a slice are changed only once
 * they are sent. */
#define _GNU_SOURCE
#include "collectives/two_host_all_reduce.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdalign.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "shm/reduce.h"
#include "shm/wait.h"

/* A rank's part of a piece: it stays in the second-level cache from its reduction to its last copy. */
#define SLICE_BYTES ((size_t)256 << 10)

/* What is received at a time: it is still in the cache when it is added. */
#define ROOM_BYTES ((size_t)64 << 10)

/* How long to sleep before looking at deadline and end again, as in wait.c. */
#define NAP_MS 50

struct crossing {
    struct ah_group *group;
    struct ah_rail rail;
    unsigned char *data;
    size_t slice;         /* bytes of a slice, but for those of the last piece */
    size_t total;         /* bytes of all our slices, which follow one another on the connection */
    size_t ready;         /* so many of them are reduced in this host, */
    size_t sent, taken;   /* so many have gone, to so many the other's are added */
    size_t held;          /* bytes in the room */
    size_t size;          /* of an element */
    uint32_t dtype, step; /* AVG is a sum that is divided */
    int average;
    int64_t until_ns; /* on CLOCK_MONOTONIC; negative: never */
    unsigned char *room;
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t left_ns(const struct crossing *crossing)
{
    int64_t left = crossing->until_ns < 0 ? -1 : crossing->until_ns - now_ns();

    return crossing->until_ns >= 0 && left < 0 ? 0 : left;
}

/* Where the slice of `rank` in the piece of that number lies, or our own. */
static struct ah_part slice_of(const struct crossing *crossing, size_t piece, uint32_t rank)
{
    size_t bytes = ah_span(crossing->total, crossing->slice, piece);

    return (struct ah_part){
        .data = crossing->data + piece * crossing->slice * crossing->group->ranks + rank * bytes,
        .bytes = bytes,
    };
}

/* The rest of the slice in which byte `at` of our slices is. */
static struct ah_part rest_of(const struct crossing *crossing, size_t at)
{
    size_t piece = at / crossing->slice, past = at % crossing->slice;
    struct ah_part part = slice_of(crossing, piece, crossing->group->rank);

    return (struct ah_part){.data = part.data + past, .bytes = part.bytes - past};
}

/* The other end is gone: nobody on this host can go on. */
static int lost(struct crossing *crossing)
{
    ah_end(crossing->group, AH_ABORTED, crossing->group->rank);
    crossing->group->culprit = crossing->group->rank;
    return AH_DEAD;
}

static int send_some(struct crossing *crossing, int *moved)
{
    while (crossing->sent < crossing->ready) {
        struct ah_part part = rest_of(crossing, crossing->sent);
        ssize_t sent = send(crossing->rail.fd, part.data, ah_min(part.bytes, crossing->ready - crossing->sent),
                            MSG_DONTWAIT | MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? AH_OK : lost(crossing);
        crossing->sent += (size_t)sent;
        *moved = 1;
    }
    return AH_OK;
}

/* Add what stands in the room, as far as its elements are whole. */
static void add(struct crossing *crossing)
{
    size_t count = crossing->held / crossing->size, bytes = count * crossing->size;
    unsigned char *mine = rest_of(crossing, crossing->taken).data;
    const void *sources[2] = {crossing->rail.first ? mine : crossing->room, crossing->rail.first ? crossing->room : mine};

    ah_reduce(crossing->dtype, crossing->step, mine, sources, 2, count);
    if (crossing->average)
        ah_divide(crossing->dtype, mine, count, crossing->rail.ranks);
    crossing->held -= bytes;
    crossing->taken += bytes;
    memmove(crossing->room, crossing->room + bytes, crossing->held);
}

static int take_some(struct crossing *crossing, int *moved)
{
    while (crossing->taken + crossing->held < crossing->sent) {
        size_t most = ah_min(crossing->sent - crossing->taken, rest_of(crossing, crossing->taken).bytes);
        ssize_t got = recv(crossing->rail.fd, crossing->room + crossing->held,
                           ah_min(ROOM_BYTES, most) - crossing->held, MSG_DONTWAIT);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? AH_OK : lost(crossing);
        if (got == 0)
            return lost(crossing);
        crossing->held += (size_t)got;
        add(crossing);
        *moved = 1;
    }
    return AH_OK;
}

static int nap(struct crossing *crossing)
{
    struct ah_group *group = crossing->group;
    struct pollfd look = {.fd = crossing->rail.fd};
    int code = ah_ended(group);

    if (code != AH_OK)
        return code;
    if (left_ns(crossing) == 0) {
        group->culprit = group->rank;
        return AH_TIMEOUT;
    }
    if (group->pulse && group->pulse(group->context) != 0) {
        ah_end(group, AH_ABORTED, group->rank);
        group->culprit = group->rank;
        return AH_INTERRUPTED;
    }
    look.events = (short)((crossing->sent < crossing->ready ? POLLOUT : 0) |
                          (crossing->taken + crossing->held < crossing->sent ? POLLIN : 0));
    poll(&look, 1, NAP_MS);
    return AH_OK;
}

/* Send and take what can be, and wait until `goal` of our bytes are there. */
static int move(struct crossing *crossing, size_t goal)
{
    uint32_t yields = 0;

    for (;;) {
        int moved = 0, code = send_some(crossing, &moved);

        if (code == AH_OK)
            code = take_some(crossing, &moved);
        if (code != AH_OK || crossing->taken >= goal)
            return code;
        if (moved)
            yields = 0;
        else if (yields++ < crossing->group->yields)
            sched_yield();
        else if ((code = nap(crossing)) != AH_OK)
            return code;
    }
}

static int bring(struct crossing *crossing, size_t piece)
{
    struct ah_part parts[AH_MOST_RANKS];
    int code;

    for (uint32_t rank = 0; rank < crossing->group->ranks; rank++)
        parts[rank] = slice_of(crossing, piece, rank);
    code = ah_reduce_scatter(crossing->group, parts, parts[crossing->group->rank], crossing->dtype, crossing->step,
                             left_ns(crossing));
    crossing->ready += parts[0].bytes;
    return code;
}

/* Wait for our slice of the piece, and give it to everyone here. */
static int spread(struct crossing *crossing, size_t piece)
{
    struct ah_part parts[AH_MOST_RANKS];
    int code = move(crossing, ah_min(crossing->total, (piece + 1) * crossing->slice));

    for (uint32_t rank = 0; rank < crossing->group->ranks; rank++)
        parts[rank] = slice_of(crossing, piece, rank);
    if (code == AH_OK)
        code = ah_all_gather(crossing->group, parts[crossing->group->rank], parts, AH_U8, left_ns(crossing));
    return code;
}

int ah_cross(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, struct ah_rail rail,
             int64_t timeout_ns)
{
    alignas(64) unsigned char room[ROOM_BYTES];
    struct crossing crossing = {
        .group = group,
        .rail = rail,
        .data = data.data,
        .slice = SLICE_BYTES,
        .total = data.bytes / group->ranks,
        .size = ah_dtype_bytes(dtype),
        .dtype = dtype,
        .step = reduction == AH_AVG ? AH_SUM : reduction,
        .average = reduction == AH_AVG,
        .until_ns = timeout_ns < 0 ? -1 : now_ns() + timeout_ns,
        .room = room,
    };
    size_t pieces;
    int code = AH_OK;

    if (!ah_reducible(dtype, reduction) || group->ranks > AH_MOST_RANKS ||
        data.bytes % (crossing.size * group->ranks) != 0)
        return AH_BROKEN;
    pieces = ah_chunks(crossing.total, crossing.slice);
    for (size_t step = 0; code == AH_OK && step < pieces + 1; step++) {
        if (step < pieces)
            code = bring(&crossing, step);
        if (code == AH_OK && step < pieces)
            code = move(&crossing, 0);
        if (code == AH_OK && step >= 1)
            code = spread(&crossing, step - 1);
    }
    return code;
}
