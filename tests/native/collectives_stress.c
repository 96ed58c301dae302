/* The C core with threads as ranks on ONE mapping, so that ThreadSanitizer sees every access of every rank: random
 * operations against a model, with tickets that wrap around, a rank with a different call, and a group that ends.
 *
 *   collectives_stress [seed [operations]]      prints what it did; exits 1 at the first difference */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "shm/tensor_list.h"
#include "collectives/collective.h"
#include "shm/helper_threads.h"
#include "shm/reduce.h"
#include "shm/wait.h"

#define MOST_RANKS 5
/* Small slots make many chunks of few bytes. */
#define SLOT_BYTES 4096
#define MOST_ELEMENTS 3000
#define LIMIT_NS 20000000000LL

static const unsigned char NONCE[16] = "stress";

enum ending { TO_THE_END, MISMATCH, ABORT };

struct run {
    void *memory;
    size_t bytes;
    uint32_t ranks, start, first; /* the first ticket, and the first sequence */
    unsigned seed, operations, last; /* `last`: the operation at which the group ends */
    enum ending ending;
    uint32_t odd; /* the rank that causes it */
    uint32_t helpers;
};

struct rank {
    struct run *run;
    uint32_t number;
    int code;
    uint32_t culprit;
};

static unsigned next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void fail(const struct rank *rank, unsigned operation, const char *what)
{
    fprintf(stderr, "seed %u, %u ranks, rank %u, operation %u: %s\n", rank->run->seed, rank->run->ranks, rank->number,
            operation, what);
    exit(1);
}

/* Element `at` of the tensor that `rank` has for `to` in `operation`: small, so that sums are exact. */
static unsigned value(unsigned operation, uint32_t rank, uint32_t to, size_t at)
{
    unsigned mixed = operation * 2654435761u ^ rank * 40503u ^ to * 9176u ^ (unsigned)at * 2246822519u;

    return mixed >> 13 & 3;
}

static void put(void *data, uint32_t dtype, size_t at, uint64_t number)
{
    switch (dtype) {
    case AH_U8:
        ((uint8_t *)data)[at] = (uint8_t)number;
        break;
    case AH_I32:
        ((int32_t *)data)[at] = (int32_t)number;
        break;
    case AH_F32:
        ((float *)data)[at] = (float)number;
        break;
    default:
        ((double *)data)[at] = (double)number;
    }
}

static uint64_t reduced(unsigned operation, uint32_t ranks, uint32_t to, size_t at, uint32_t reduction)
{
    uint64_t total = value(operation, 0, to, at);

    for (uint32_t rank = 1; rank < ranks; rank++) {
        uint64_t one = value(operation, rank, to, at);

        if (reduction == AH_SUM)
            total += one;
        else if (reduction == AH_PRODUCT)
            total *= one;
        else
            total = one > total ? one : total;
    }
    return total;
}

struct buffers {
    unsigned char *in[MOST_RANKS], *out[MOST_RANKS], *want;
};

#define MOST_PIECES 6

/* An all_reduce of one tensor as a list, cut at the same places on every rank; some parts are empty. */
static int reduce_in_pieces(struct ah_group *group, struct ah_part whole, uint32_t dtype, uint32_t reduction, unsigned *choice)
{
    size_t width = ah_dtype_bytes(dtype), left = whole.bytes / width, number = 1 + next(choice) % MOST_PIECES;
    struct ah_tensor_list tensors;
    int code;

    if (ah_tensor_list_alloc(&tensors, number) != 0)
        return AH_INVALID;
    for (size_t piece = 0; piece < number; piece++) {
        size_t some = piece == number - 1 ? left : next(choice) % (left + 1);

        tensors.parts[piece] = (struct ah_part){.data = whole.data, .bytes = some * width};
        whole.data += some * width;
        left -= some;
    }
    ah_tensor_list_set_ends(&tensors);
    code = ah_tensor_list_is_disjoint(&tensors) ? ah_all_reduce_list(group, tensors, dtype, reduction, LIMIT_NS) : AH_INVALID;
    ah_tensor_list_free(&tensors);
    return code;
}

/* One operation of the kind, with sizes that every rank computes from the same numbers. */
static int operate(struct rank *rank, struct ah_group *group, unsigned operation, unsigned *choice, struct buffers *use)
{
    static const uint32_t DTYPES[] = {AH_U8, AH_I32, AH_F32, AH_F64};
    static const uint32_t REDUCTIONS[] = {AH_SUM, AH_PRODUCT, AH_MAX};
    uint32_t ranks = group->ranks, mine = group->rank, root = next(choice) % ranks;
    uint32_t kind = AH_BARRIER + next(choice) % AH_ALL_TO_ALL, dtype = DTYPES[next(choice) % 4];
    uint32_t reduction = REDUCTIONS[next(choice) % 3];
    size_t width = ah_dtype_bytes(dtype), most = next(choice) % 3 == 0 ? MOST_ELEMENTS : 40;
    size_t count[MOST_RANKS][MOST_RANKS], same = next(choice) % most;
    struct ah_part in[MOST_RANKS], out[MOST_RANKS];
    int code = AH_INVALID;

    for (uint32_t from = 0; from < ranks; from++) {
        for (uint32_t to = 0; to < ranks; to++)
            count[from][to] = next(choice) % most;
    }
    if (rank->run->ending == MISMATCH && operation == rank->run->last && mine == rank->run->odd)
        kind = kind == AH_ALL_TO_ALL ? AH_BARRIER : kind + 1;
    for (uint32_t each = 0; each < ranks; each++) {
        /* Tensors of one size, one for each rank; all_to_all has its own sizes, all_gather those of the first. */
        size_t give = kind == AH_ALL_TO_ALL || kind == AH_SCATTER ? count[mine][each] : same;
        size_t get = kind == AH_ALL_TO_ALL ? count[each][mine] : same;

        if (kind == AH_ALL_GATHER || kind == AH_GATHER) {
            give = count[mine][0];
            get = count[each][0];
        }
        if (kind == AH_SCATTER)
            get = count[root][mine];
        in[each] = (struct ah_part){.data = use->in[each], .bytes = give * width};
        out[each] = (struct ah_part){.data = use->out[each], .bytes = get * width};
        for (size_t at = 0; at < give; at++)
            put(use->in[each], dtype, at, value(operation, mine, each, at));
    }
    switch (kind) {
    case AH_BARRIER:
        return ah_barrier(group, LIMIT_NS);
    case AH_ALL_REDUCE:
        code = reduce_in_pieces(group, in[0], dtype, reduction, choice);
        break;
    case AH_REDUCE:
        code = ah_reduce_to_root(group, in[0], dtype, reduction, root, LIMIT_NS);
        break;
    case AH_BROADCAST:
        code = ah_broadcast(group, in[0], dtype, root, LIMIT_NS);
        break;
    case AH_ALL_GATHER:
        code = ah_all_gather(group, in[0], out, dtype, LIMIT_NS);
        break;
    case AH_GATHER:
        code = ah_gather(group, in[0], mine == root ? out : NULL, dtype, root, LIMIT_NS);
        break;
    case AH_SCATTER:
        code = ah_scatter(group, mine == root ? in : NULL, out[0], dtype, root, LIMIT_NS);
        break;
    case AH_REDUCE_SCATTER:
        code = ah_reduce_scatter(group, in, out[0], dtype, reduction, LIMIT_NS);
        break;
    case AH_ALL_TO_ALL:
        code = ah_all_to_all(group, in, out, dtype, LIMIT_NS);
        break;
    }
    for (uint32_t each = 0; code == AH_OK && each < ranks; each++) {
        struct ah_part got = kind <= AH_BROADCAST ? in[0] : out[each];
        int single = kind <= AH_BROADCAST || kind == AH_SCATTER || kind == AH_REDUCE_SCATTER;

        if ((single && each > 0) || (kind == AH_GATHER && mine != root))
            break;
        for (size_t at = 0; at < got.bytes / width; at++) {
            uint64_t number;

            if (kind == AH_ALL_REDUCE || (kind == AH_REDUCE && mine == root))
                number = reduced(operation, ranks, 0, at, reduction);
            else if (kind == AH_REDUCE)
                number = value(operation, mine, 0, at);
            else if (kind == AH_BROADCAST)
                number = value(operation, root, 0, at);
            else if (kind == AH_SCATTER)
                number = value(operation, root, mine, at);
            else if (kind == AH_REDUCE_SCATTER)
                number = reduced(operation, ranks, mine, at, reduction);
            else
                number = value(operation, each, kind == AH_ALL_TO_ALL ? mine : 0, at);
            put(use->want, dtype, at, number);
        }
        if (memcmp(use->want, got.data, got.bytes) != 0)
            fail(rank, operation, "the result is not the model's");
    }
    return code;
}

/* Enough for a part for every helper thread, and not a multiple of anything. */
#define LARGE_ELEMENTS ((size_t)(AH_MAX_HELPER_THREADS + 1) * (1 << 16) + 4099)
#define LARGE_TURNS 3

/* Tensors that all helper threads of all ranks split, one after the other. */
static void *reduce_large(void *given)
{
    struct rank *rank = given;
    struct run *run = rank->run;
    int pidfds[MOST_RANKS] = {-1, -1, -1, -1, -1};
    float *data = malloc(LARGE_ELEMENTS * sizeof *data);
    struct ah_group group;

    if (!data || ah_segment_open(&group, run->memory, run->bytes, rank->number, NONCE, pidfds) != AH_OK)
        fail(rank, 0, "not a segment");
    group.yields = 5;
    for (unsigned turn = 0; rank->code == AH_OK && turn < LARGE_TURNS; turn++) {
        /* Fewer helper threads have a part each time. */
        size_t count = LARGE_ELEMENTS >> turn;

        for (size_t at = 0; at < count; at++)
            data[at] = (float)value(turn, rank->number, 0, at);
        if (run->ending == ABORT && turn == run->last && rank->number == run->odd)
            ah_group_end(&group, AH_ABORTED, rank->number);
        rank->code = ah_all_reduce(&group, (struct ah_part){.data = (unsigned char *)data, .bytes = count * sizeof *data}, AH_F32,
                                   AH_SUM, LIMIT_NS);
        for (size_t at = 0; rank->code == AH_OK && at < count; at += 61) {
            if (data[at] != (float)reduced(turn, run->ranks, 0, at, AH_SUM))
                fail(rank, turn, "the result with helper threads is not the model's");
        }
    }
    rank->culprit = group.culprit;
    ah_helper_threads_stop(&group);
    free(data);
    return NULL;
}

static void *work(void *given)
{
    struct rank *rank = given;
    struct run *run = rank->run;
    unsigned choice = run->seed, own = run->seed * 31 + rank->number;
    int pidfds[MOST_RANKS] = {-1, -1, -1, -1, -1};
    struct ah_group group;
    struct buffers use;

    if (ah_segment_open(&group, run->memory, run->bytes, rank->number, NONCE, pidfds) != AH_OK)
        fail(rank, 0, "not a segment");
    group.ticket = run->start;
    group.sequence = group.uncompared = group.reusable = group.synchronized = run->first;
    group.spins = run->seed % 2 ? 50 : 0;
    group.yields = 5;
    for (uint32_t each = 0; each < MOST_RANKS; each++) {
        use.in[each] = malloc(MOST_ELEMENTS * 8);
        use.out[each] = malloc(MOST_ELEMENTS * 8);
    }
    use.want = malloc(MOST_ELEMENTS * 8);
    for (unsigned operation = 0; rank->code == AH_OK && operation < run->operations; operation++) {
        if (next(&own) % 8 == 0)
            sched_yield();
        if (run->ending == ABORT && operation == run->last && rank->number == run->odd)
            ah_group_end(&group, AH_ABORTED, rank->number);
        rank->code = operate(rank, &group, operation, &choice, &use);
    }
    rank->culprit = group.culprit;
    ah_helper_threads_stop(&group);
    for (uint32_t each = 0; each < MOST_RANKS; each++) {
        free(use.in[each]);
        free(use.out[each]);
    }
    free(use.want);
    return NULL;
}

static void stress(struct run *run)
{
    static const int EXPECTED[] = {AH_OK, AH_MISMATCH, AH_ABORTED};
    struct rank ranks[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    struct ah_group look;
    int pidfds[MOST_RANKS] = {0};

    size_t slot_bytes = run->ranks % 2 ? SLOT_BYTES : 4 * SLOT_BYTES; /* chunks rotate in the larger ones */

    run->bytes = ah_segment_bytes(run->ranks, slot_bytes, run->helpers);
    run->memory = mmap(NULL, run->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (run->memory == MAP_FAILED)
        exit(2);
    ah_segment_format(run->memory, run->ranks, slot_bytes, run->helpers, run->ranks % 2 == 0, NONCE);
    ah_segment_open(&look, run->memory, run->bytes, 0, NONCE, pidfds);
    for (uint32_t number = 0; number < run->ranks; number++) {
        struct ah_member *member = &look.members[number];

        atomic_store(&member->arrived, run->start);
        atomic_store(&member->reduced, run->start);
        atomic_store(&member->consumed, run->start);
        atomic_store(&member->begun, run->first);
        atomic_store(&member->checked, run->first);
        for (uint32_t index = 0; index < AH_CALL_DEPTH; index++)
            atomic_store(&member->fingerprints[index].stamp, run->first);
    }
    for (uint32_t number = 0; number < run->ranks; number++) {
        ranks[number] = (struct rank){.run = run, .number = number};
        pthread_create(&threads[number], NULL, run->helpers ? reduce_large : work, &ranks[number]);
    }
    for (uint32_t number = 0; number < run->ranks; number++)
        pthread_join(threads[number], NULL);
    for (uint32_t number = 0; number < run->ranks; number++) {
        if (ranks[number].code != EXPECTED[run->ending])
            fail(&ranks[number], run->last, "the code is not the one expected");
        if (run->ending == ABORT && ranks[number].culprit != run->odd)
            fail(&ranks[number], run->last, "the culprit is not the one expected");
    }
    munmap(run->memory, run->bytes);
}

int main(int argc, char **argv)
{
    unsigned seed = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 1, done = 0;
    unsigned operations = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 2000;

    for (unsigned turn = 0; done < operations; turn++) {
        struct run run = {.ranks = 1 + turn % MOST_RANKS, .seed = seed + turn, .operations = 60};

        /* In every other run tickets and stamps wrap around. */
        run.start = turn % 2 ? 0xffffffffu - 200 : 0;
        run.first = turn % 2 ? 0xffffffffu - 30 : 0;
        run.ending = run.ranks == 1 ? TO_THE_END : turn / MOST_RANKS % 3;
        run.last = 20 + (seed + turn) % 30;
        run.odd = (seed + turn) % run.ranks;
        stress(&run);
        done += run.ending == TO_THE_END ? run.operations : run.last;
    }
    for (unsigned turn = 0; turn < 2 * AH_MAX_HELPER_THREADS; turn++) {
        struct run run = {.ranks = 2 + turn % 2,
                          .seed = seed + turn,
                          .helpers = 1 + turn % AH_MAX_HELPER_THREADS,
                          .last = turn % LARGE_TURNS};

        run.ending = turn < AH_MAX_HELPER_THREADS ? TO_THE_END : ABORT;
        run.odd = turn % run.ranks;
        stress(&run);
    }
    printf("%u operations from seed %u, each with 1 to %d ranks: no difference\n", done, seed, MOST_RANKS);
    return 0;
}
