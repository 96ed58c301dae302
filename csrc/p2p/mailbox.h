/* What the mail of a group looks like in shared memory: each rank has a box that everyone else puts envelopes into.
 *
 *   odd | box of rank 0, blocks of rank 0 | … | box of rank n-1, blocks of rank n-1
 *
 * A box is a bounded ring with many writers and one reader, its owner. Small messages stand in their envelope. Of a
 * large one only the envelope (an offer) goes into the ring; once the owner has a buffer for it, it lends a lane (a run
 * of its blocks) to the sender by an envelope (a grant), and the sender streams through that lane. So a message that
 * nobody wants yet never holds a block, and nothing here grows with the square of the ranks. */
#ifndef ALLHANDS_INBOX_H
#define ALLHANDS_INBOX_H

#include "shm/segment.h"

/* Messages up to this stand in their envelope: a page is copied in about the time that an offer and a grant take. */
#define AH_EAGER_BYTES ((size_t)4096)

/* Envelopes in a ring: a quarter of a megabyte of small messages may stand before a rank that is busy elsewhere. */
#define AH_ENVELOPES 64

/* A lane is one or more blocks: 2 MiB a rank in all, so that sixteen senders can stream to one rank, and what is under way stays in
 * the caches, though not in the second-level cache of who read it. */
#define AH_BLOCKS 16
#define AH_BLOCK_BYTES ((size_t)128 << 10)

enum ah_envelope_kind {
    AH_WHOLE = 1, /* a message with all its bytes */
    AH_OFFER,     /* a message whose bytes come when a lane is granted; `id` is the sender's */
    AH_GRANT,     /* the answer: `tag` is the first block of the lane, `bytes` the number of blocks */
};

/* What stands on an envelope. */
struct ah_cover {
    uint64_t tag;
    uint64_t bytes;
    uint32_t source;
    uint32_t dtype;
    uint32_t kind;
    uint32_t id;
};

struct ah_envelope {
    /* 2 * lap where it may be written, one more where it may be read: fresh, zeroed memory is ready. */
    alignas(64) _Atomic uint64_t turn;
    struct ah_cover cover;
    unsigned char payload[AH_EAGER_BYTES];
};

/* Bytes that went in and out of a lane since it was granted. Two writers, so two lines. */
struct ah_lane {
    alignas(AH_LINE) _Atomic uint64_t filled;
    alignas(AH_LINE) _Atomic uint64_t drained;
};

struct ah_box {
    alignas(AH_LINE) _Atomic uint64_t tail; /* the next place to write; the reader keeps its own */
    /* Seldom written, read by everyone who has put something in. */
    alignas(AH_LINE) _Atomic uint32_t sleeping; /* threads of the owner that sleep on the bell */
    _Atomic uint32_t bell;
    _Atomic uint32_t starving; /* someone found the ring full */
    struct ah_lane lanes[AH_BLOCKS]; /* a lane goes by its first block */
    struct ah_envelope ring[AH_ENVELOPES];
};

/* A message that did not fit its receive. The first one of a group stands. */
struct ah_odd {
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

/* Bytes of the mail of `ranks`, after the slots of the segment. */
size_t ah_inbox_bytes(uint32_t ranks);

struct ah_odd *ah_odd_of(const struct ah_group *group);

struct ah_box *ah_box_of(const struct ah_group *group, uint32_t rank);

unsigned char *ah_block_of(const struct ah_group *group, uint32_t rank, uint32_t block);

/* Put an envelope into the box of `to`, with `cover->bytes` of `payload` if it is whole; 0 where there is no room. */
int ah_inbox_put(const struct ah_group *group, uint32_t to, const struct ah_cover *cover, const void *payload);

/* The envelope at place `head` of our own box, NULL where none has come. */
const struct ah_envelope *ah_inbox_look(const struct ah_group *group, uint64_t head);

/* Give the place of a read envelope back. */
void ah_inbox_free(const struct ah_group *group, uint64_t head);

/* Wake `rank` if it sleeps, after something was changed for it. */
void ah_ring(const struct ah_group *group, uint32_t rank);

/* Wake everyone who sleeps. */
void ah_ring_all(const struct ah_group *group);

/* Sleep until our bell rings, at most `limit_ns`. `bell` was read, and nothing found to do after it, with the bell's
 * `sleeping` raised. Returns not 0 where a signal came. */
int ah_sleep(struct ah_box *box, uint32_t bell, int64_t limit_ns);

#endif
