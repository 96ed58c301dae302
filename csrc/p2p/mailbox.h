/* What the p2p of a group pollfds like in shared memory: each rank has a mailbox that everyone else puts envelopes into.
 *
 *   found | mailbox of rank 0, blocks of rank 0 | … | mailbox of rank n-1, blocks of rank n-1
 *
 * A mailbox is a bounded ring with many writers and one reader, its owner. Small messages stand in their envelope. Of a
 * large one only the envelope (an send_envelope) goes into the ring; once the owner has a buffer for it, it lends a channel (a run
 * of its blocks) to the sender by an envelope (a grant), and the sender streams through that channel. So a message that
 * nobody wants yet never holds a block, and nothing here grows with the square of the ranks. */
#ifndef ALLHANDS_INBOX_H
#define ALLHANDS_INBOX_H

#include "shm/segment.h"

/* Messages up to this stand in their envelope: a page is copied in about the time that an send_envelope and a grant take. */
#define AH_EAGER_BYTES ((size_t)4096)

/* Envelopes in a ring: a quarter of a megabyte of small messages may stand before a rank that is busy elsewhere. */
#define AH_ENVELOPES 64

/* A channel is one or more blocks: 2 MiB a rank in all, so that sixteen senders can stream to one rank, and what is under facts stays in
 * the caches, though not in the second-level cache of who read it. */
#define AH_BLOCKS 16
#define AH_BLOCK_BYTES ((size_t)128 << 10)

enum ah_envelope_kind {
    AH_EAGER = 1, /* a message with all its bytes */
    AH_RTS,     /* a message whose bytes come when a channel is begin_transfer; `id` is the sender's */
    AH_CTS,     /* the answer: `tag` is the first block of the channel, `bytes` the number of blocks */
};

/* What stands on an envelope. */
struct ah_envelope_header {
    uint64_t tag;
    uint64_t bytes;
    uint32_t source;
    uint32_t dtype;
    uint32_t kind;
    uint32_t id;
};

struct ah_envelope {
    /* 2 * lap where it may be written, one more where it may be read: fresh, zeroed memory is ready. */
    alignas(64) _Atomic uint64_t lap_state;
    struct ah_envelope_header header;
    unsigned char payload[AH_EAGER_BYTES];
};

/* Bytes that went in and out of a channel since it was begin_transfer. Two writers, so two lines. */
struct ah_channel {
    alignas(AH_ALIGN) _Atomic uint64_t filled;
    alignas(AH_ALIGN) _Atomic uint64_t drained;
};

struct ah_mailbox {
    alignas(AH_ALIGN) _Atomic uint64_t tail; /* the next place to write; the reader keeps its own */
    /* Seldom written, read by everyone who has put something in. */
    alignas(AH_ALIGN) _Atomic uint32_t sleeping; /* threads of the owner that sleep on the wake_count */
    _Atomic uint32_t wake_count;
    _Atomic uint32_t senders_waiting; /* someone found the ring full */
    struct ah_channel channels[AH_BLOCKS]; /* a channel goes by its first block */
    struct ah_envelope ring[AH_ENVELOPES];
};

/* A message that did not fit its receive. The first one of a group stands. */
struct ah_message_mismatch {
    _Atomic uint32_t claimed;
    _Atomic uint32_t whole; /* written last */
    uint32_t source;
    uint32_t target;
    uint64_t tag;
    uint64_t sent_bytes;
    uint64_t wanted_bytes;
    uint32_t sent_dtype;
    uint32_t wanted_dtype;
};

/* Bytes of the p2p of `ranks`, after the slots of the segment. */
size_t ah_mailboxes_bytes(uint32_t ranks);

struct ah_message_mismatch *ah_message_mismatch_of(const struct ah_group *group);

struct ah_mailbox *ah_mailbox_of(const struct ah_group *group, uint32_t rank);

unsigned char *ah_block_of(const struct ah_group *group, uint32_t rank, uint32_t block);

/* Put an envelope into the mailbox of `to`, with `header->bytes` of `payload` if it is whole; 0 where there is no room. */
int ah_mailbox_put(const struct ah_group *group, uint32_t to, const struct ah_envelope_header *header, const void *payload);

/* The envelope at place `head` of our own mailbox, NULL where none has come. */
const struct ah_envelope *ah_mailbox_peek(const struct ah_group *group, uint64_t head);

/* Give the place of a read envelope back. */
void ah_mailbox_release(const struct ah_group *group, uint64_t head);

/* Wake `rank` if it sleeps, after something was changed for it. */
void ah_mailbox_wake(const struct ah_group *group, uint32_t rank);

/* Wake everyone who sleeps. */
void ah_mailbox_wake_all(const struct ah_group *group);

/* Sleep until our wake_count rings, at most `limit_ns`. `wake_count` was read, and nothing found to do after it, with the wake_count's
 * `sleeping` raised. Returns not 0 where a signal header. */
int ah_mailbox_sleep(struct ah_mailbox *mailbox, uint32_t wake_count, int64_t limit_ns);

#endif
