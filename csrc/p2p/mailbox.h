/* Mailboxes in shared memory: each rank has one, into which every other rank puts envelopes.
 *
 *   message mismatch | mailbox of rank 0, blocks of rank 0 | … | mailbox of rank n-1, blocks of rank n-1
 *
 * A mailbox is a bounded ring with many writers and one reader, its owner. An eager message is in its envelope. Of a
 * large message only an RTS (ready to send) is put into the ring; when the receive is posted, the owner allocates a
 * channel (a run of its blocks) and sends a CTS (clear to send), and the sender copies through that channel. So an
 * unexpected large message holds no block, and the memory grows linearly with the ranks. */
#ifndef ALLHANDS_MAILBOX_H
#define ALLHANDS_MAILBOX_H

#include "shm/segment.h"

/* Largest eager message: copying a page takes about as long as an RTS and a CTS. */
#define AH_EAGER_BYTES ((size_t)4096)

/* Envelopes in a ring: 256 KiB of small messages can wait for a rank that is busy elsewhere. */
#define AH_ENVELOPES 64

/* A channel is one or more blocks. 2 MiB per rank: sixteen senders can transfer to one rank, and the data stays in
 * L3. */
#define AH_BLOCKS 16
#define AH_BLOCK_BYTES ((size_t)128 << 10)

enum ah_envelope_kind {
    AH_EAGER = 1, /* a message with its payload */
    AH_RTS,       /* RTS of a large message; `id` is the sender's */
    AH_CTS,       /* CTS: `tag` is the first block of the channel, `bytes` the number of blocks */
};

/* Header of an envelope. */
struct ah_envelope_header {
    uint64_t tag;
    uint64_t bytes;
    uint32_t source;
    uint32_t dtype;
    uint32_t kind;
    uint32_t id;
};

struct ah_envelope {
    /* 2 * lap: free; 2 * lap + 1: written. Zeroed memory is free in lap 0. */
    alignas(64) _Atomic uint64_t lap_state;
    struct ah_envelope_header header;
    unsigned char payload[AH_EAGER_BYTES];
};

/* Bytes that were written to and read from a channel. Two writers, so two lines. */
struct ah_channel {
    alignas(AH_ALIGN) _Atomic uint64_t filled;
    alignas(AH_ALIGN) _Atomic uint64_t drained;
};

struct ah_mailbox {
    alignas(AH_ALIGN) _Atomic uint64_t tail; /* the next place to write; the reader keeps its own */
    /* Seldom written, read by every sender. */
    alignas(AH_ALIGN) _Atomic uint32_t sleeping; /* threads of the owner that sleep */
    _Atomic uint32_t wake_count;
    _Atomic uint32_t senders_waiting; /* a sender found the ring full */
    struct ah_channel channels[AH_BLOCKS]; /* indexed by the first block */
    struct ah_envelope ring[AH_ENVELOPES];
};

/* A message that did not fit its receive; only the first one of a group is kept. */
struct ah_message_mismatch {
    _Atomic uint32_t claimed;
    _Atomic uint32_t whole; /* set after the other fields */
    uint32_t source;
    uint32_t target;
    uint64_t tag;
    uint64_t sent_bytes;
    uint64_t wanted_bytes;
    uint32_t sent_dtype;
    uint32_t wanted_dtype;
};

/* Bytes of the mailboxes of `ranks`, after the slots of the segment. */
size_t ah_mailboxes_bytes(uint32_t ranks);

struct ah_message_mismatch *ah_message_mismatch_of(const struct ah_group *group);

struct ah_mailbox *ah_mailbox_of(const struct ah_group *group, uint32_t rank);

unsigned char *ah_block_of(const struct ah_group *group, uint32_t rank, uint32_t block);

/* Put an envelope into the mailbox of `to`, with `header->bytes` of `payload` if it is eager. Returns 0 if the ring
 * is full. */
int ah_mailbox_put(const struct ah_group *group, uint32_t to, const struct ah_envelope_header *header,
                   const void *payload);

/* The envelope at position `head` of our mailbox, NULL if none has arrived. */
const struct ah_envelope *ah_mailbox_peek(const struct ah_group *group, uint64_t head);

/* Release the position of an envelope that was read. */
void ah_mailbox_release(const struct ah_group *group, uint64_t head);

/* Wake `rank` if it sleeps, after a change that it waits for. */
void ah_mailbox_wake(const struct ah_group *group, uint32_t rank);

/* Wake all ranks that sleep. */
void ah_mailbox_wake_all(const struct ah_group *group);

/* Sleep until our mailbox is woken, at most `limit_ns`. The caller has incremented `sleeping`, then read
 * `wake_count`, then found nothing to do. Returns nonzero if a signal arrived. */
int ah_mailbox_sleep(struct ah_mailbox *mailbox, uint32_t wake_count, int64_t limit_ns);

#endif
