#define _GNU_SOURCE
#include "mpi/ferry.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "shm/wait.h"

/* One message's bytes at most: MPI counts in 31 bits. */
#define MOST_BYTES ((size_t)1 << 30)

/* Tags of what stands in no other order. */
enum tag { RECORD = 1, DATA = 2, TABLE = 3 };

/* How long to give the core away each time before sleeping in between, which nobody ends: a message wakes no one. Then
 * how long a sleep is. */
#define YIELD_NS 50000000
#define NAP_NS 100000

/* How often the handlers of signals are let run: Ctrl-C is heard within this. */
#define PULSE_NS 50000000

/* Requests that there is room for at first; more are a matter of messages beyond 1 GiB. */
#define FIRST_ROOM 64

/* Failures of MPI are kept for whoever says what happened. */
static int said(struct ah_ferry *ferry, int error)
{
    if (error != 0)
        ferry->error = error;
    return error == 0 ? AH_OK : AH_INVALID;
}

static int make_room(struct ah_ferry *ferry, struct ah_requests *requests, uint32_t more)
{
    uint32_t room = requests->room ? requests->room : FIRST_ROOM;
    void *handles;

    if (requests->count + more <= requests->room)
        return AH_OK;
    while (room < requests->count + more)
        room *= 2;
    handles = realloc(requests->handles, room * ferry->mpi->handle_bytes);
    if (!handles)
        return AH_INVALID;
    requests->handles = handles;
    requests->room = room;
    return AH_OK;
}

/* Prepare to receive everyone's record, each time the same way. Sends are not: MPI has a shorter way for small ones that
 * are begun and over at once. */
static int prepare(struct ah_ferry *ferry)
{
    struct ah_mpi *mpi = ferry->mpi;
    int code = make_room(ferry, &ferry->records, ferry->ranks);

    for (uint32_t peer = 0; code == AH_OK && peer < ferry->ranks; peer++) {
        struct ah_sheet *sheet = &ferry->sheets[peer];

        if (peer != ferry->rank)
            code = said(ferry,
                        mpi->prepare(mpi, ferry->comm, 0, sheet, sizeof *sheet, (int)peer, RECORD, &ferry->records));
    }
    return code;
}

/* Begin to give our record to everyone, with the data on its sheet. */
static int tell(struct ah_ferry *ferry, size_t data_bytes)
{
    struct ah_sheet *sheet = &ferry->sheets[ferry->rank];
    size_t bytes = data_bytes > 0 ? offsetof(struct ah_sheet, room) + data_bytes
                                  : offsetof(struct ah_record, text) + sheet->record.length;
    int code;

    if (ferry->wall.pins) {
        ferry->heard = 0;
        ah_wall_tell(&ferry->wall, ferry->rank, ferry->sequence, sheet, bytes);
        return AH_OK;
    }
    if (ferry->records.count == 0) /* many: all records are gathered when they are compared */
        return AH_OK;
    code = said(ferry, ferry->mpi->start(ferry->mpi, &ferry->records));
    if (code == AH_OK)
        code = make_room(ferry, &ferry->told, ferry->ranks);
    for (uint32_t turn = 1; code == AH_OK && turn < ferry->ranks; turn++) {
        int peer = (int)((ferry->rank + turn) % ferry->ranks);

        code = said(ferry,
                    ferry->mpi->begin(ferry->mpi, ferry->comm, 1, sheet, (int)bytes, peer, RECORD, &ferry->told));
    }
    return code;
}

int ah_ferry_open(struct ah_ferry *ferry)
{
    ferry->sheets = aligned_alloc(64, ferry->ranks * sizeof *ferry->sheets);
    ferry->mine = aligned_alloc(64, sizeof *ferry->mine);
    ferry->rows = calloc(ferry->ranks, sizeof *ferry->rows);
    if (!ferry->sheets || !ferry->mine || !ferry->rows)
        return -1;
    memset(ferry->sheets, 0, ferry->ranks * sizeof *ferry->sheets);
    memset(ferry->mine, 0, sizeof *ferry->mine);
    if (ferry->wall.pins || ferry->ranks == 1 || ferry->ranks > AH_FERRY_FEW)
        return 0;
    return prepare(ferry) == AH_OK ? 0 : -1;
}

void ah_ferry_close(struct ah_ferry *ferry)
{
    if (ferry->left || !ferry->sheets)
        return;
    ferry->under_way = 1; /* no further call */
    if (ferry->records.count > 0)
        ferry->mpi->release(ferry->mpi, &ferry->records);
    ah_wall_close(&ferry->wall);
    free(ferry->records.handles);
    free(ferry->told.handles);
    free(ferry->coming.handles);
    free(ferry->going.handles);
    free(ferry->space);
    free(ferry->sheets);
    free(ferry->mine);
    free(ferry->tables);
    free(ferry->rows);
    ferry->sheets = NULL;
    ferry->tables = NULL;
}

/* Waiting ------------------------------------------------------------------------------------------------- */

/* Tell whether everyone's record stands on the wall, and have read those that do. MPI moves data meanwhile; what it says
 * of that is kept until records are compared, because data that does not fit is what records that differ explain. */
static int look_at_wall(struct ah_ferry *ferry)
{
    struct ah_requests *data = ferry->coming.count > 0 ? &ferry->coming : &ferry->going;
    int moved;

    while (ferry->heard < ferry->ranks &&
           (ferry->heard == ferry->rank ||
            ah_wall_hear(&ferry->wall, ferry->heard, ferry->sequence, &ferry->sheets[ferry->heard])))
        ferry->heard++;
    if (ferry->heard == ferry->ranks)
        return 1;
    if (data->count > 0 && ferry->error == 0)
        said(ferry, ferry->mpi->test(ferry->mpi, data, data->count, &moved));
    else
        ah_relax();
    return 0;
}

/* Tell whether the first `count` are over; without requests, whether all records are there. */
static int look(struct ah_ferry *ferry, struct ah_requests *requests, uint32_t count, int *over)
{
    if (requests)
        return said(ferry, ferry->mpi->test(ferry->mpi, requests, count, over));
    *over = look_at_wall(ferry);
    return AH_OK;
}

/* Give the core away until the first `count` are over. */
static int await_patiently(struct ah_ferry *ferry, struct ah_requests *requests, uint32_t count)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    int64_t begun = ah_clock_ns(), now = begun, heard = begun;

    for (;;) {
        int over = 0;

        /* Several times: MPI moves a piece each time it is asked. */
        for (uint32_t time = 0; time < ferry->burst; time++) {
            if (look(ferry, requests, count, &over) != AH_OK)
                return AH_INVALID;
            if (over)
                return AH_OK;
        }
        if (atomic_load_explicit(&ferry->over, memory_order_acquire))
            return AH_ABORTED;
        now = ah_clock_ns();
        if (now > ferry->deadline_ns)
            return AH_TIMEOUT;
        if (ferry->check_interrupt && now - heard > PULSE_NS) {
            if (ferry->check_interrupt(ferry->context) != 0)
                return AH_INTERRUPTED;
            heard = ah_clock_ns();
        }
        if (now - begun < YIELD_NS)
            sched_yield();
        else
            nanosleep(&nap, NULL);
    }
}

static int await(struct ah_ferry *ferry, struct ah_requests *requests, uint32_t count)
{
    if (requests && count == 0)
        return AH_OK;
    for (uint32_t spin = 0; spin <= ferry->spins; spin++) {
        int over = 0;

        if (look(ferry, requests, count, &over) != AH_OK)
            return AH_INVALID;
        if (over)
            return AH_OK;
    }
    return await_patiently(ferry, requests, count);
}

int ah_ferry_finish_coming(struct ah_ferry *ferry)
{
    int code = await(ferry, &ferry->coming, ferry->coming.count);

    if (code == AH_OK)
        ferry->coming.count = 0;
    return code;
}

int ah_ferry_finish_going(struct ah_ferry *ferry, uint32_t count)
{
    struct ah_requests *going = &ferry->going;
    size_t each = ferry->mpi->handle_bytes;
    int code = await(ferry, going, count);

    if (code == AH_OK && count > 0) {
        going->count -= count;
        memmove(going->handles, (unsigned char *)going->handles + count * each, going->count * each);
    }
    return code;
}

int ah_ferry_finish(struct ah_ferry *ferry)
{
    int code = ah_ferry_finish_coming(ferry);

    return code == AH_OK ? ah_ferry_finish_going(ferry, ferry->going.count) : code;
}

/* Beginning ----------------------------------------------------------------------------------------------- */

static int begin(struct ah_ferry *ferry, int sends, unsigned char *data, size_t bytes, uint32_t peer)
{
    struct ah_requests *requests = sends ? &ferry->going : &ferry->coming;

    for (size_t at = 0; at < bytes; at += MOST_BYTES) {
        int part = (int)ah_min(MOST_BYTES, bytes - at), code = make_room(ferry, requests, 1);

        if (code == AH_OK)
            code = said(ferry,
                        ferry->mpi->begin(ferry->mpi, ferry->comm, sends, data + at, part, (int)peer, DATA, requests));
        if (code != AH_OK)
            return code;
    }
    return AH_OK;
}

int ah_ferry_send(struct ah_ferry *ferry, const void *data, size_t bytes, uint32_t peer)
{
    return begin(ferry, 1, (unsigned char *)data, bytes, peer);
}

int ah_ferry_receive(struct ah_ferry *ferry, void *data, size_t bytes, uint32_t peer)
{
    return begin(ferry, 0, data, bytes, peer);
}

int ah_ferry_broadcast(struct ah_ferry *ferry, void *data, size_t bytes, uint32_t root)
{
    for (size_t at = 0; at < bytes; at += MOST_BYTES) {
        int part = (int)ah_min(MOST_BYTES, bytes - at), code = make_room(ferry, &ferry->going, 1);

        if (code == AH_OK)
            code = said(ferry, ferry->mpi->broadcast(ferry->mpi, ferry->comm, (unsigned char *)data + at, part, (int)root,
                                                     &ferry->going));
        if (code != AH_OK)
            return code;
    }
    return AH_OK;
}

int ah_ferry_depart(struct ah_ferry *ferry, const struct ah_trip *trip, int64_t timeout_ns)
{
    struct ah_record *record;

    if (ferry->under_way)
        return AH_INVALID;
    record = &ferry->sheets[ferry->rank].record;
    ferry->under_way = 1;
    ferry->error = 0;
    ferry->deadline_ns = timeout_ns < 0 ? INT64_MAX : ah_clock_ns() + timeout_ns;
    ferry->sequence++;
    free(ferry->tables);
    ferry->tables = NULL;
    record->sequence = ferry->sequence;
    record->bytes = trip->bytes;
    record->kind = trip->kind;
    record->reduction = trip->reduction;
    record->dtype = trip->dtype;
    record->root = trip->root;
    record->flags = trip->flags;
    if (atomic_load_explicit(&ferry->over, memory_order_acquire))
        return AH_ABORTED;
    return tell(ferry, trip->with);
}

/* Comparing ----------------------------------------------------------------------------------------------- */

static int hear(struct ah_ferry *ferry)
{
    struct ah_requests gathered = {0};
    int code;

    if (ferry->wall.pins) {
        code = await(ferry, NULL, 0);
        return code == AH_TIMEOUT && ferry->error != 0 ? AH_INVALID : code;
    }
    if (ferry->ranks <= AH_FERRY_FEW) {
        code = await(ferry, &ferry->records, ferry->records.count);
        if (code == AH_OK)
            code = await(ferry, &ferry->told, ferry->told.count);
        if (code == AH_OK)
            ferry->told.count = 0;
        return code;
    }
    memcpy(ferry->mine, &ferry->sheets[ferry->rank], sizeof *ferry->mine);
    code = make_room(ferry, &gathered, 1);
    if (code == AH_OK)
        code = said(ferry, ferry->mpi->gather(ferry->mpi, ferry->comm, ferry->mine, ferry->sheets, sizeof *ferry->mine,
                                              &gathered));
    if (code == AH_OK)
        code = await(ferry, &gathered, gathered.count);
    if (code == AH_OK)
        free(gathered.handles); /* else MPI may look there */
    return code;
}

static size_t bytes_of(const struct ah_part *parts, uint32_t rank, const struct ah_trip *trip)
{
    return parts ? parts[rank].bytes : trip->bytes;
}

/* Exchange tables of sizes, because someone's are uneven, and compare them pair by pair. */
static int compare_sizes(struct ah_ferry *ferry, const struct ah_trip *trip)
{
    uint32_t ranks = ferry->ranks;
    size_t bytes = 2 * ranks * sizeof(int64_t);
    struct ah_requests tables = {0};
    int64_t *mine;
    int code = AH_OK;

    ferry->tables = malloc(ranks * bytes);
    if (!ferry->tables)
        return AH_INVALID;
    mine = ferry->tables + 2 * ranks * ferry->rank;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        mine[rank] = (int64_t)bytes_of(trip->gives, rank, trip);
        mine[ranks + rank] = (int64_t)bytes_of(trip->takes, rank, trip);
    }
    /* Beside the data, not after it: where sizes do not fit, that never comes. */
    code = make_room(ferry, &tables, 2 * ranks);
    for (int sends = 0; sends < 2; sends++) {
        for (uint32_t peer = 0; code == AH_OK && peer < ranks; peer++) {
            int64_t *table = ferry->tables + 2 * ranks * (sends ? ferry->rank : peer);

            if (peer != ferry->rank)
                code = said(ferry, ferry->mpi->begin(ferry->mpi, ferry->comm, sends, table, (int)bytes, (int)peer, TABLE,
                                                     &tables));
        }
    }
    if (code == AH_OK)
        code = await(ferry, &tables, tables.count);
    if (code != AH_OK)
        return code;
    free(tables.handles);
    for (uint32_t from = 0; from < ranks; from++) {
        for (uint32_t to = 0; to < ranks; to++) {
            if (ferry->tables[2 * ranks * from + to] != ferry->tables[2 * ranks * to + ranks + from])
                return AH_MISMATCH;
        }
    }
    return AH_OK;
}

int ah_ferry_compare(struct ah_ferry *ferry, const struct ah_trip *trip)
{
    int code = hear(ferry);

    if (code != AH_OK)
        return code;
    switch (ah_records_compare(ferry->sheets, ferry->ranks, ferry->rank)) {
    case AH_ALIKE:
        break;
    case AH_ALIKE_BUT_SIZES:
        code = compare_sizes(ferry, trip);
        break;
    default:
        code = AH_MISMATCH;
    }
    return code == AH_OK && ferry->error != 0 ? AH_INVALID : code;
}

int ah_ferry_arrive(struct ah_ferry *ferry, int code)
{
    if (code == AH_OK) {
        ferry->under_way = 0;
        return code;
    }
    for (uint32_t index = 0; !ferry->left && index < ferry->coming.count; index++)
        ferry->mpi->cancel(ferry->mpi, &ferry->coming, index); /* it may be over already */
    ferry->left = 1;
    return code;
}
