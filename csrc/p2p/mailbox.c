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

/* One page more than the blocks need, against power-of-two aliasing between ranks. */
static size_t stride(void)
{
    return pages(sizeof(struct ah_mailbox)) + AH_BLOCKS * AH_BLOCK_BYTES + PAGE;
}

size_t ah_mailboxes_bytes(uint32_t ranks)
{
    return pages(sizeof(struct ah_message_mismatch)) + ranks * stride();
}

struct ah_message_mismatch *ah_message_mismatch_of(const struct ah_group *group)
{
    return (struct ah_message_mismatch *)group->mailboxes;
}

struct ah_mailbox *ah_mailbox_of(const struct ah_group *group, uint32_t rank)
{
    return (struct ah_mailbox *)(group->mailboxes + pages(sizeof(struct ah_message_mismatch)) + rank * stride());
}

unsigned char *ah_block_of(const struct ah_group *group, uint32_t rank, uint32_t block)
{
    return (unsigned char *)ah_mailbox_of(group, rank) + pages(sizeof(struct ah_mailbox)) + block * AH_BLOCK_BYTES;
}

/* Claim the next free position; several ranks may do so concurrently. */
static struct ah_envelope *claim(struct ah_mailbox *mailbox, uint64_t *lap)
{
    uint64_t place = atomic_load_explicit(&mailbox->tail, memory_order_relaxed);

    for (;;) {
        struct ah_envelope *envelope = &mailbox->ring[place % AH_ENVELOPES];
        uint64_t lap_state = atomic_load_explicit(&envelope->lap_state, memory_order_acquire);

        *lap = place / AH_ENVELOPES;
        if (lap_state == 2 * *lap) {
            if (atomic_compare_exchange_weak_explicit(&mailbox->tail, &place, place + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                return envelope;
        } else if ((int64_t)(lap_state - 2 * *lap) < 0) {
            return NULL; /* not read since the last lap */
        } else {
            place = atomic_load_explicit(&mailbox->tail, memory_order_relaxed);
        }
    }
}

int ah_mailbox_put(const struct ah_group *group, uint32_t to, const struct ah_envelope_header *header,
                   const void *payload)
{
    struct ah_mailbox *mailbox = ah_mailbox_of(group, to);
    struct ah_envelope *place;
    uint64_t lap;

    place = claim(mailbox, &lap);
    if (!place) {
        /* A reader that releases a position after this store wakes us; one that did so before has made room. */
        atomic_store(&mailbox->senders_waiting, 1);
        atomic_thread_fence(memory_order_seq_cst);
        place = claim(mailbox, &lap);
        if (!place)
            return 0;
    }
    place->header = *header;
    if (header->kind == AH_EAGER && header->bytes != 0)
        memcpy(place->payload, payload, header->bytes);
    atomic_store_explicit(&place->lap_state, 2 * lap + 1, memory_order_release);
    ah_mailbox_wake(group, to);
    return 1;
}

const struct ah_envelope *ah_mailbox_peek(const struct ah_group *group, uint64_t head)
{
    struct ah_envelope *place = &ah_mailbox_of(group, group->rank)->ring[head % AH_ENVELOPES];
    uint64_t lap_state = atomic_load_explicit(&place->lap_state, memory_order_acquire);

    return lap_state == 2 * (head / AH_ENVELOPES) + 1 ? place : NULL;
}

void ah_mailbox_release(const struct ah_group *group, uint64_t head)
{
    struct ah_envelope *place = &ah_mailbox_of(group, group->rank)->ring[head % AH_ENVELOPES];

    atomic_store_explicit(&place->lap_state, 2 * (head / AH_ENVELOPES) + 2, memory_order_release);
}

static void wake(struct ah_mailbox *mailbox)
{
    atomic_fetch_add(&mailbox->wake_count, 1);
    /* Not FUTEX_PRIVATE: the sleeper is in another process. */
    syscall(SYS_futex, &mailbox->wake_count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void ah_mailbox_wake(const struct ah_group *group, uint32_t rank)
{
    struct ah_mailbox *mailbox = ah_mailbox_of(group, rank);

    /* Store-load fence: a sleeper that registered before our change is seen below, a later one sees the change. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&mailbox->sleeping, memory_order_relaxed) != 0)
        wake(mailbox);
}

void ah_mailbox_wake_all(const struct ah_group *group)
{
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        ah_mailbox_wake(group, rank);
}

int ah_mailbox_sleep(struct ah_mailbox *mailbox, uint32_t wake_count, int64_t limit_ns)
{
    const struct timespec limit = {.tv_sec = limit_ns / 1000000000, .tv_nsec = limit_ns % 1000000000};

    return syscall(SYS_futex, &mailbox->wake_count, FUTEX_WAIT, wake_count, &limit, NULL, 0) != 0 && errno == EINTR;
}
