/* Two threads as the ranks of a shelf: each puts some of its values there, in an order of its own, with pauses; the other may come first,
 * later or never. What is not left is the average of both, to the bit, and both leave the same. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "shelf.h"
#include "wait.h"

#define VALUES 24

/* Every one of so many rounds has the large value, and is looked at in full: that is what takes the time. */
#define FULL_EVERY 8
#define LARGE 7

/* In floats: small ones, some of one piece and a little, and one larger than a rank's part of the shelf. */
static const size_t NUMBERS[VALUES] = {1,     3,  16, 17,    1000, 40000, 70000, 1300000, 5,     2,   900, 33000,
                                       64,    65, 12345, 8,  1,    1,     7,     50000,   100,   20,  32768, 32769};

struct rank {
    struct ah_shelf shelf;
    float *values[VALUES];
    size_t left[VALUES], number_left;
    uint32_t *log; /* what was left in each round, a bit for each value */
    uint64_t random;
};

struct job {
    struct rank ranks[2];
    pthread_barrier_t meeting;
    int few; /* some values are not put there */
    uint32_t rounds;
};

struct part {
    struct job *job;
    uint32_t rank;
};

static void check(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static uint64_t next(uint64_t *random)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

static float value_of(uint32_t round, uint32_t rank, size_t value, size_t at)
{
    return (float)((round * 31 + rank * 7 + value * 3 + at) % 1000) / 7 - 50;
}

static void put_all(struct job *job, struct rank *rank)
{
    size_t order[VALUES];

    for (size_t value = 0; value < VALUES; value++)
        order[value] = value;
    /* Nearly in order, as gradients come. */
    for (size_t value = 1; value < VALUES; value++) {
        if (next(&rank->random) % 4 == 0) {
            size_t other = order[value];

            order[value] = order[value - 1];
            order[value - 1] = other;
        }
    }
    for (size_t each = 0; each < VALUES; each++) {
        if (order[each] == LARGE && rank->shelf.round % FULL_EVERY != 0)
            continue;
        for (uint64_t pause = next(&rank->random) % 2000; pause > 0; pause--)
            ah_relax();
        if (!job->few || next(&rank->random) % 3 != 0)
            ah_shelf_put(&rank->shelf, order[each], (unsigned char *)rank->values[order[each]], AH_F32);
    }
}

static int is_left(const struct rank *rank, size_t value)
{
    for (size_t each = 0; each < rank->number_left; each++) {
        if (rank->left[each] == value)
            return 1;
    }
    return 0;
}

static void compare(const struct rank *rank, uint32_t number, uint32_t round)
{
    for (size_t value = 0; value < VALUES; value++) {
        int left = is_left(rank, value);

        for (size_t at = 0; at < NUMBERS[value]; at++) {
            float own = value_of(round, number, value, at), average = (value_of(round, 0, value, at) + value_of(round, 1, value, at)) / 2;
            float found = rank->values[value][at];

            check(found == average || (left && found == own), "a value is neither ours nor the average");
        }
    }
}

static void *run(void *given)
{
    struct part *part = given;
    struct job *job = part->job;
    struct rank *rank = &job->ranks[part->rank];

    for (uint32_t round = 0; round < job->rounds; round++) {
        for (size_t value = 0; value < VALUES; value++) {
            for (size_t at = 0; at < NUMBERS[value] && (value != LARGE || round % FULL_EVERY == 0); at++)
                rank->values[value][at] = value_of(round, part->rank, value, at);
        }
        put_all(job, rank);
        for (int looks = 0; looks < 100 && ah_shelf_settle(&rank->shelf) > 0; looks++)
            ah_relax();
        pthread_barrier_wait(&job->meeting);
        rank->number_left = ah_shelf_end(&rank->shelf, rank->left);
        for (size_t each = 0; each < rank->number_left; each++)
            rank->log[round] |= (uint32_t)1 << rank->left[each];
        /* The other may be in its next round from here on, which is no matter to this one. */
        if (round % FULL_EVERY == 0)
            compare(rank, part->rank, round);
    }
    return NULL;
}

static void race(int few, uint32_t rounds)
{
    size_t sizes[VALUES];
    struct job job = {.few = few, .rounds = rounds};
    struct part parts[2] = {{&job, 0}, {&job, 1}};
    pthread_t threads[2];
    unsigned char *memory;
    uint32_t averaged = 0;

    for (size_t value = 0; value < VALUES; value++)
        sizes[value] = NUMBERS[value] * sizeof(float);
    memory = aligned_alloc(4096, (ah_shelf_bytes(sizes, VALUES) + 4095) / 4096 * 4096);
    check(memory != NULL, "no memory");
    memset(memory, 0, ah_shelf_bytes(sizes, VALUES));
    pthread_barrier_init(&job.meeting, NULL, 2);
    for (uint32_t rank = 0; rank < 2; rank++) {
        job.ranks[rank].random = 17 + rank;
        job.ranks[rank].log = calloc(rounds, sizeof *job.ranks[rank].log);
        check(job.ranks[rank].log != NULL, "no memory");
        check(ah_shelf_make(&job.ranks[rank].shelf, memory, sizes, VALUES, rank) == 0, "no shelf");
        for (size_t value = 0; value < VALUES; value++) {
            job.ranks[rank].values[value] = malloc(sizes[value]);
            check(job.ranks[rank].values[value] != NULL, "no memory");
        }
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        check(pthread_create(&threads[rank], NULL, run, &parts[rank]) == 0, "no thread");
    for (uint32_t rank = 0; rank < 2; rank++)
        pthread_join(threads[rank], NULL);
    for (uint32_t round = 0; round < rounds; round++) {
        check(job.ranks[0].log[round] == job.ranks[1].log[round], "ranks leave different values");
        averaged += few ? 0 : VALUES - (uint32_t)__builtin_popcount(job.ranks[0].log[round]);
    }
    check(few || averaged > rounds * VALUES / 4, "little was averaged");
    for (uint32_t rank = 0; rank < 2; rank++) {
        ah_shelf_free(&job.ranks[rank].shelf);
        free(job.ranks[rank].log);
        for (size_t value = 0; value < VALUES; value++)
            free(job.ranks[rank].values[value]);
    }
    pthread_barrier_destroy(&job.meeting);
    free(memory);
}

int main(int number, char **given)
{
    uint32_t rounds = number > 1 ? (uint32_t)atoi(given[1]) : 1000;

    race(0, rounds);
    race(1, rounds);
    return 0;
}
