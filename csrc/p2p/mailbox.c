#define _GNU_SOURCE
#include "p2p/mailbox.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u

static size_t pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* A page more than the blocks take, against power-of-two aliasing between ranks. */
static size_t stride(void)
{
    return pages(sizeof(struct ah_box)) + AH_BLOCKS * AH_BLOCK_BYTES + PAGE;
}

size_t ah_inbox_bytes(uint32_t ranks)
{
    return pages(sizeof(struct ah_odd)) + ranks * stride();
}

struct ah_odd *ah_odd_of(const struct ah_group *group)
{
    return (struct ah_odd *)group->mail;
}

struct ah_box *ah_box_of(const struct ah_group *group, uint32_t rank)
{
    return (struct ah_box *)(group->mail + pages(sizeof(struct ah_odd)) + rank * stride());
}

unsigned char *ah_block_of(const struct ah_group *group, uint32_t rank, uint32_t block)
{
    return (unsigned char *)ah_box_of(group, rank) + pages(sizeof(struct ah_box)) + block * AH_BLOCK_BYTES;
}

/* Take the next free place of a ring: many ranks may do so at once. */
static struct ah_envelope *claim(struct ah_box *box, uint64_t *lap)
{
    uint64_t place = atomic_load_explicit(&box->tail, memory_order_relaxed);

    for (;;) {
        struct ah_envelope *envelope = &box->ring[place % AH_ENVELOPES];
        uint64_t turn = atomic_load_explicit(&envelope->turn, memory_order_acquire);

        *lap = place / AH_ENVELOPES;
        if (turn == 2 * *lap) {
            if (atomic_compare_exchange_weak_explicit(&box->tail, &place, place + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                return envelope;
        } else if ((int64_t)(turn - 2 * *lap) < 0) {
            return NULL; /* still holds what was written a lap ago */
        } else {
            place = atomic_load_explicit(&box->tail, memory_order_relaxed);
        }
    }
}

int ah_inbox_put(const struct ah_group *group, uint32_t to, const struct ah_cover *cover, const void *payload)
{
    struct ah_box *box = ah_box_of(group, to);
    struct ah_envelope *place;
    uint64_t lap;

    place = claim(box, &lap);
    if (!place) {
        /* Whoever reads after this store rings; whoever read before it has made room by now. */
        atomic_store(&box->starving, 1);
        atomic_thread_fence(memory_order_seq_cst);
        place = claim(box, &lap);
        if (!place)
            return 0;
    }
    place->cover = *cover;
    if (cover->kind == AH_WHOLE && cover->bytes != 0)
        memcpy(place->payload, payload, cover->bytes);
    atomic_store_explicit(&place->turn, 2 * lap + 1, memory_order_release);
    ah_ring(group, to);
    return 1;
}

const struct ah_envelope *ah_inbox_look(const struct ah_group *group, uint64_t head)
{
    struct ah_envelope *place = &ah_box_of(group, group->rank)->ring[head % AH_ENVELOPES];
    uint64_t turn = atomic_load_explicit(&place->turn, memory_order_acquire);

    return turn == 2 * (head / AH_ENVELOPES) + 1 ? place : NULL;
}

void ah_inbox_free(const struct ah_group *group, uint64_t head)
{
    struct ah_envelope *place = &ah_box_of(group, group->rank)->ring[head % AH_ENVELOPES];

    atomic_store_explicit(&place->turn, 2 * (head / AH_ENVELOPES) + 2, memory_order_release);
}

static void wake(struct ah_box *box)
{
    atomic_fetch_add(&box->bell, 1);
    /* Not FUTEX_PRIVATE: whoever sleeps is another process. */
    syscall(SYS_futex, &box->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void ah_ring(const struct ah_group *group, uint32_t rank)
{
    struct ah_box *box = ah_box_of(group, rank);

    /* Whoever began to sleep before our change is seen by the load below; whoever begins after it sees the change. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&box->sleeping, memory_order_relaxed) != 0)
        wake(box);
}

void ah_ring_all(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        ah_ring(group, rank);
}

int ah_sleep(struct ah_box *box, uint32_t bell, int64_t limit_ns)
{
    const struct timespec limit = {.tv_sec = limit_ns / 1000000000, .tv_nsec = limit_ns % 1000000000};

    return syscall(SYS_futex, &box->bell, FUTEX_WAIT, bell, &limit, NULL, 0) != 0 && errno == EINTR;
}
