/* The shared segment of a group on one host: its layout, and one process's view of it.
 *
 *   header | members | payloads | slots | mailboxes (mailbox.h) | members and slots of each helper thread
 *
 * A member writes only its own part (except `waiters`), every rank reads all of it. Data moves in chunks with a
 * running number, the ticket; all ranks use the same tickets in the same order, because they make the same calls
 * (compared before data is touched). Chunk t of a member is in its slot t % AH_SLOTS, at a position that rotates in
 * it (cico_slot.h). Three counters per member publish its progress:
 *
 *   arrived   its chunks below this ticket are in its slots
 *   reduced   its part of the chunks below this ticket is reduced (reductions only)
 *   consumed  it has read all that it needs of the chunks below this ticket
 *
 * A slot may be written again once every rank has consumed its chunk. */
#ifndef ALLHANDS_SEGMENT_H
#define ALLHANDS_SEGMENT_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/codes.h"
#include "shm/nt_store.h"

/* Two cache lines: common prefetchers fetch them in pairs. */
#define AH_ALIGN 128

/* Copy-in, reduction and copy-out of three chunks overlap; one more lets a fast rank begin the next. */
#define AH_SLOTS 4

/* Most helper threads of a rank: more gain little where memory bandwidth is the limit. */
#define AH_MAX_HELPER_THREADS 3

/* Slot size of a helper thread: one chunk of all_reduce. */
#define AH_HELPER_SLOT_BYTES ((size_t)64 << 10)

/* Fingerprints per rank, so how many calls a rank that does not wait can be ahead. Where ranks outnumber cores, this
 * many calls are made per context switch. */
#define AH_CALL_DEPTH 32

/* A call, as ranks compare it before they touch each other's data. */
struct ah_call {
    uint64_t sequence;
    uint64_t count;  /* bytes, or 0 where ranks may differ */
    uint16_t kind;   /* which operation */
    uint16_t reduce; /* which reduction, 0 for none */
    uint16_t dtype;
    int16_t root; /* -1 for none */
    uint64_t list_digest; /* of the sizes of a tensor list; 0 for a single tensor */
};

/* Data up to this size is in the fingerprint, so that a reader fetches both, mostly in one line. */
#define AH_INLINE_BYTES 72

/* Data up to this size is in the fingerprint's page of payload: copying a page costs less than a call through the
 * slots. */
#define AH_PAYLOAD_BYTES ((size_t)4096)

/* Instead of the bytes in a fingerprint: the data goes through the slots. */
#define AH_NO_PAYLOAD UINT32_MAX

/* One call of one rank; see fingerprint.c. */
struct ah_fingerprint {
    /* The call's sequence + 1, set after the fingerprint and its payload. */
    alignas(AH_ALIGN) _Atomic uint32_t stamp;
    uint32_t bytes; /* of one part, where ranks may differ; AH_NO_PAYLOAD */
    struct ah_call call;
    unsigned char inline_payload[AH_INLINE_BYTES];
    /* The tensor's place in a window. If ranks differ, the data goes through the slots. */
    uint64_t offset;
    uint32_t window; /* 0 for none */
};

struct ah_member {
    alignas(AH_ALIGN) _Atomic uint32_t arrived;
    _Atomic uint32_t reduced;
    _Atomic uint32_t consumed;
    _Atomic uint32_t left;  /* not 0: it makes no further call */
    _Atomic uint32_t read_failed; /* not 0: it could not read a peer's memory */
    /* Written by waiting ranks: on a line of its own, so that waiting does not slow the owner. */
    alignas(AH_ALIGN) _Atomic uint32_t waiters;
    _Atomic uint32_t wake_count;
    /* Seldom read by others, so that writing them is cheap. */
    alignas(AH_ALIGN) _Atomic uint32_t begun; /* it has begun the calls below this sequence */
    _Atomic uint32_t checked;                /* it needs no fingerprint of calls below this sequence */
    struct ah_fingerprint fingerprints[AH_CALL_DEPTH];
    /* Sizes that differ between ranks (uneven all_gather and all_to_all): the largest part of each call. */
    alignas(AH_ALIGN) _Atomic uint64_t largest[AH_CALL_DEPTH];
};

struct ah_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint32_t helper_threads; /* of each rank */
    uint64_t slot_bytes;     /* of one slot, without padding */
    uint64_t ring_bytes;     /* bytes of the slots of a rank that are used in rotation */
    uint32_t victim_l3;      /* not 0: see ah_has_victim_l3 */
    uint64_t total_bytes;
    unsigned char nonce[16];
    /* Nonzero once the group has ended: an outcome code, and above its 8 bits the culprit. One word, so that the
     * first reason is kept. */
    alignas(AH_ALIGN) _Atomic uint32_t ended;
};

/* Further memory that all ranks map: a region of `stride` bytes for each. */
struct ah_window {
    unsigned char *base;
    size_t stride;
    uint32_t id; /* the same on every rank: windows are made by all ranks together */
    const struct ah_window *next;
};

struct ah_helper_threads;

struct ah_group {
    struct ah_header *head;
    struct ah_member *members;
    unsigned char *payloads;
    unsigned char *slots;
    size_t slot_bytes;
    size_t slot_stride; /* from one slot to the next: a page more, against power-of-two aliasing */
    size_t ring_bytes;
    int victim_l3;
    struct ah_nt_store store; /* to our slots */
    unsigned char *mailboxes;
    uint32_t rank;
    uint32_t ranks;
    uint32_t ticket;
    uint64_t sequence;
    struct ah_call call;
    uint32_t uncompared;   /* the first call that was not compared with all ranks */
    uint32_t reusable;     /* no rank needs a fingerprint of calls below this sequence */
    uint32_t synchronized; /* after the last call in which all ranks waited for all */
    int wake_due;          /* a counter was set and sleepers were not checked */
    int found_mismatch;    /* this rank found the mismatch that ended the group */
    int64_t now_ns;        /* the time, if the caller has just read it; else 0 */
    int64_t deadline_ns; /* of the current call, on CLOCK_MONOTONIC */
    uint32_t culprit;    /* of the call that ended badly */
    uint32_t spins;      /* spins before yielding */
    uint32_t yields;     /* yields before sleeping */
    int *pidfds;         /* one for each rank, -1 for our own */
    const int *pids;     /* of each rank, for single copy; NULL where it is not used */
    const struct ah_window *windows;
    uint32_t windows_made;
    unsigned long long window_calls;  /* calls that were done in a window */
    unsigned long long single_copy_calls; /* calls that were done by single copy */
    struct ah_helper_threads *helper_threads; /* NULL before the first call that uses them */
    /* Called periodically while waiting; nonzero interrupts the call and ends the group. */
    int (*check_interrupt)(void *context);
    /* Called once before a wait that may be long (the GIL is released there); may be NULL. */
    void (*on_long_wait)(void *context);
    void *context;
};

/* Size of a segment for `ranks` members with slots of `slot_bytes` and so many helper threads each. */
size_t ah_segment_bytes(uint32_t ranks, size_t slot_bytes, uint32_t helper_threads);

/* Whether L3 is a victim cache (AMD): rewriting a slot is cheap once it has been evicted from the readers' L2. */
int ah_has_victim_l3(void);

/* Write the header; the memory is `ah_segment_bytes` of zeroed pages. */
void ah_segment_format(void *memory, uint32_t ranks, size_t slot_bytes, uint32_t helper_threads, int victim_l3,
                       const unsigned char nonce[16]);

/* Attach to a mapped segment as `rank`; AH_INVALID if the header is not valid. `pidfds` stays the caller's. */
int ah_segment_open(struct ah_group *group, void *memory, size_t bytes, uint32_t rank,
                    const unsigned char nonce[16], int *pidfds);

/* The group as helper thread `helper` sees it: it ends with the group, and has members and slots of its own. */
void ah_segment_helper_view(const struct ah_group *group, uint32_t helper, struct ah_group *view);

static inline unsigned char *ah_slot(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    size_t index = (size_t)rank * AH_SLOTS + ticket % AH_SLOTS;

    return group->slots + index * group->slot_stride;
}

#endif
