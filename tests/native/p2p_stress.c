/* Messages of the C core with threads as ranks, for ThreadSanitizer: several threads of each rank send and receive at
 * once while a progress thread completes posted requests. Prints "ok" and exits with 0, or prints what is wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "p2p/mailbox.h"
#include "p2p/matching.h"

#define RANKS 3
#define WORKERS 2
#define STEPS 150
#define MOST 300000

static const size_t SIZES[] = {0, 8, 4096, 4097, 20000, 131072, MOST};

struct rank {
    struct ah_group group;
    struct ah_p2p *p2p;
    /* For each worker: how many of its messages the progress thread has reported. */
    _Atomic int reported[WORKERS];
};

struct worker {
    struct rank *rank;
    int number;
};

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    abort();
}

static void *progress(void *context)
{
    struct rank *self = context;
    uint64_t keys[4];
    size_t number;

    while ((number = ah_p2p_progress(self->p2p, keys, 4)) != 0) {
        for (size_t index = 0; index < number; index++)
            atomic_fetch_add(&self->reported[keys[index]], 1);
    }
    return NULL;
}

static void *work(void *context)
{
    struct worker *self = context;
    struct rank *rank = self->rank;
    unsigned char *out = malloc(MOST), *in = malloc(MOST);

    for (int step = 0; step < STEPS; step++) {
        uint32_t shift = (uint32_t)step % RANKS, mine = rank->group.rank;
        size_t bytes = SIZES[(step * 5 + self->number) % (sizeof SIZES / sizeof *SIZES)];
        struct ah_message send = {.data = out, .bytes = bytes, .tag = (uint64_t)self->number, .dtype = 1,
                                  .peer = (mine + shift) % RANKS, .sends = 1};
        struct ah_message receive = {.data = in, .bytes = bytes, .tag = send.tag, .dtype = 1,
                                     .peer = (mine + RANKS - shift) % RANKS};
        struct ah_request *request;
        struct ah_outcome outcome;
        int leave = step % 3 == 0;

        memset(out, (int)mine * 50 + step % 50, bytes);
        memset(in, 255, bytes);
        atomic_store(&rank->reported[self->number], 0);
        outcome = ah_p2p_post(rank->p2p, &receive, -1, (uint64_t)self->number, &request);
        if (ah_p2p_run(rank->p2p, &send, -1, NULL).code != AH_OK)
            fail("a send failed");
        if (request && leave) {
            /* No thread waits: the progress thread must report it. */
            while (atomic_load(&rank->reported[self->number]) == 0)
                sched_yield();
            outcome = ah_p2p_test(rank->p2p, request);
        } else if (request) {
            outcome = ah_p2p_wait(rank->p2p, request, -1, NULL);
        }
        if (request)
            ah_p2p_free_request(rank->p2p, request);
        if (outcome.code != AH_OK || outcome.peer != receive.peer)
            fail("a receive failed");
        for (size_t at = 0; at < bytes; at++) {
            if (in[at] != (unsigned char)(receive.peer * 50 + (unsigned)step % 50))
                fail("wrong bytes");
        }
    }
    free(out);
    free(in);
    return NULL;
}

/* A CTS whose blocks are not in the mailbox ends the group, and no memory outside it is written. */
static void refuse_invalid_envelope(struct rank *ranks)
{
    const struct ah_envelope_header header = {.source = 0, .kind = AH_CTS, .tag = 1000, .bytes = 7};
    unsigned char byte;
    const struct ah_message receive = {.data = &byte, .bytes = 1, .dtype = 1, .tag = 9, .peer = 0};

    if (!ah_mailbox_put(&ranks[0].group, 1, &header, NULL))
        fail("no room for an envelope");
    if (ah_p2p_run(ranks[1].p2p, &receive, 5000000000, NULL).code != AH_INVALID)
        fail("an invalid envelope was accepted");
}

int main(void)
{
    static struct rank ranks[RANKS];
    static struct worker workers[RANKS][WORKERS];
    const unsigned char nonce[16] = {1};
    int pidfds[RANKS] = {-1, -1, -1};
    size_t bytes = ah_segment_bytes(RANKS, 4096, 0);
    pthread_t progress_threads[RANKS], threads[RANKS][WORKERS];
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED)
        fail("no memory");
    ah_segment_format(memory, RANKS, 4096, 0, 0, nonce);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (ah_segment_open(&ranks[rank].group, memory, bytes, rank, nonce, pidfds) != AH_OK)
            fail("not a segment");
        ranks[rank].group.yields = 20;
        ranks[rank].p2p = ah_p2p_open(&ranks[rank].group);
        pthread_create(&progress_threads[rank], NULL, progress, &ranks[rank]);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        for (int number = 0; number < WORKERS; number++) {
            workers[rank][number] = (struct worker){.rank = &ranks[rank], .number = number};
            pthread_create(&threads[rank][number], NULL, work, &workers[rank][number]);
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        for (int number = 0; number < WORKERS; number++)
            pthread_join(threads[rank][number], NULL);
    }
    refuse_invalid_envelope(ranks);
    for (int rank = 0; rank < RANKS; rank++) {
        ah_p2p_stop(ranks[rank].p2p);
        pthread_join(progress_threads[rank], NULL);
        ah_p2p_free(ranks[rank].p2p);
    }
    munmap(memory, bytes);
    puts("ok");
    return 0;
}
