/* Threads as the ranks of a pool: in each call each rank offers it or not, keeps results of some calls, and writes to some. Where all
 * offered it, every rank finds the results there and its own tensors as they were; else they are in its tensors.
 *
 *   pool_stress [calls]             exits 1 at the first difference */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shm/tensor_list.h"
#include "collectives/collective.h"
#include "shm/pool.h"
#include "shm/reduce.h"

#define RANKS 3
#define NUMBER 5
#define SLOT_BYTES 65536
#define LIMIT_NS 20000000000LL

/* In floats; the last is the one in the cell. */
static const size_t COUNTS[NUMBER] = {1, 40000, 17, 30001, 1};
static const unsigned char NONCE[16] = "pool";

struct rank {
    uint32_t number;
    unsigned calls;
    int fd;
    void *memory;
    size_t bytes;
    pthread_barrier_t *meeting;
    unsigned *offered, *pooled; /* of each call: how many did, and whether it was used */
};

static void check(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static float value_of(unsigned call, uint32_t rank, size_t index, size_t at)
{
    return (float)((call * 31 + rank * 7 + index * 3 + at) % 64);
}

static float sum_of(unsigned call, size_t index, size_t at)
{
    float sum = 0;

    for (uint32_t rank = 0; rank < RANKS; rank++)
        sum += value_of(call, rank, index, at);
    return sum;
}

static unsigned next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Whether this rank offers the pool for a call; where it wrote to the results of an earlier one, it must hear of that first. */
static int offers(struct ah_pool *pool, int *wrote, unsigned *random)
{
    int clean;

    if (!ah_pool_is_free(pool) || next(random) % 8 == 0)
        return 0;
    clean = ah_pool_is_clean(pool);
    check(clean == !*wrote, "a page that was written to, or was not");
    *wrote = 0;
    return clean;
}

static void compare(const unsigned char *found, unsigned call, size_t index, int own, uint32_t rank)
{
    for (size_t at = 0; at < COUNTS[index]; at++) {
        float want = own ? value_of(call, rank, index, at) : sum_of(call, index, at), value;

        memcpy(&value, found + at * sizeof value, sizeof value);
        check(value == want, "a value");
    }
}

static void *run(void *given)
{
    struct rank *rank = given;
    unsigned random = rank->number * 77 + 5;
    size_t sizes[NUMBER];
    struct ah_group group;
    struct ah_pool pool;
    struct ah_bundle bundle;
    int pidfds[RANKS] = {-1, -1, -1}, wrote = 0, held = 0;

    for (size_t index = 0; index < NUMBER; index++)
        sizes[index] = COUNTS[index] * sizeof(float);
    check(ah_segment_open(&group, rank->memory, rank->bytes, rank->number, NONCE, pidfds) == AH_OK, "no segment");
    check(ah_pool_make(&pool, rank->fd, sizes, NUMBER, rank->number, RANKS) == 0, "no pool");
    check(ah_bundle_make(&bundle, NUMBER) == 0, "no memory");
    group.yields = 50;
    for (size_t index = 0; index < NUMBER; index++) {
        unsigned char *data = index == NUMBER - 1 ? (unsigned char *)pool.cell : malloc(sizes[index]);

        bundle.parts[index] = (struct ah_part){.data = data, .bytes = sizes[index]};
    }
    ah_bundle_count(&bundle);
    check(ah_pool_fits(&pool, &bundle), "it does not fit");
    bundle.pool = &pool;
    for (unsigned call = 0; call < rank->calls; call++) {
        for (size_t index = 0; index < NUMBER; index++) {
            for (size_t at = 0; at < COUNTS[index]; at++) {
                float value = value_of(call, rank->number, index, at);

                memcpy(bundle.parts[index].data + at * sizeof value, &value, sizeof value);
            }
        }
        pool.filled = 0;
        pool.offered = offers(&pool, &wrote, &random);
        if (pool.offered)
            __atomic_fetch_add(&rank->offered[call], 1, __ATOMIC_RELAXED);
        check(ah_all_reduce_bundle(&group, bundle, AH_F32, AH_SUM, LIMIT_NS) == AH_OK, "a call");
        if (pool.filled)
            __atomic_fetch_add(&rank->pooled[call], 1, __ATOMIC_RELAXED);
        compare((unsigned char *)pool.cell, call, NUMBER - 1, 0, rank->number);
        for (size_t index = 0; index + 1 < NUMBER; index++) {
            compare(bundle.parts[index].data, call, index, pool.filled, rank->number);
            if (pool.filled)
                compare(ah_pool_result(&pool, index), call, index, 0, rank->number);
        }
        if (pool.filled && next(&random) % 4 == 0) {
            memset(ah_pool_result(&pool, 1), 0xff, 4);
            wrote = 1;
        }
        if (held)
            ah_pool_release(pool.view);
        held = pool.filled && next(&random) % 4 == 0;
        if (held)
            ah_pool_hold(pool.view);
    }
    if (held)
        ah_pool_release(pool.view);
    pthread_barrier_wait(rank->meeting);
    for (size_t index = 0; index + 1 < NUMBER; index++)
        free(bundle.parts[index].data);
    ah_pool_free(&pool);
    ah_bundle_free(&bundle);
    return NULL;
}

int main(int number, char **given)
{
    unsigned calls = number > 1 ? (unsigned)strtoul(given[1], NULL, 10) : 100, used = 0;
    size_t bytes = ah_segment_bytes(RANKS, SLOT_BYTES, 0), sizes[NUMBER];
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unsigned *offered = calloc(calls, sizeof *offered), *pooled = calloc(calls, sizeof *pooled);
    int fd = memfd_create("pool", MFD_CLOEXEC);
    struct rank ranks[RANKS];
    pthread_t threads[RANKS];
    pthread_barrier_t meeting;

    for (size_t index = 0; index < NUMBER; index++)
        sizes[index] = COUNTS[index] * sizeof(float);
    check(memory != MAP_FAILED && fd >= 0 && ftruncate(fd, (off_t)ah_pool_bytes(sizes, NUMBER, RANKS)) == 0, "no memory");
    ah_segment_format(memory, RANKS, SLOT_BYTES, 0, 1, NONCE);
    pthread_barrier_init(&meeting, NULL, RANKS);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        ranks[rank] = (struct rank){rank, calls, fd, memory, bytes, &meeting, offered, pooled};
        pthread_create(&threads[rank], NULL, run, &ranks[rank]);
    }
    for (uint32_t rank = 0; rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    for (unsigned call = 0; call < calls; call++) {
        check(pooled[call] == (offered[call] == RANKS ? RANKS : 0), "a pool that not all offered was used, or one that all did was not");
        used += pooled[call] != 0;
    }
    printf("%u calls, %u of them to the pool\n", calls, used);
    free(offered);
    free(pooled);
    return used > 0 && used < calls ? 0 : 1;
}
