/* The shared segment of one group on one host: its layout, and a process's view of it.
 *
 *   header | member 0 … member n-1 | payloads of each | slots of each | mailboxes (inbox.h) | members and slots of each helper (helper_threads.h)
 *
 * A member writes only its own part (but for `waiters`), everyone reads all of it. Data moves in chunks that
 * carry a running number, the ticket; every rank takes the same tickets in the same order, because every rank
 * makes the same calls (they are compared before data is touched). Chunk t of a member stands in its slot
 * t % AH_SLOTS, at a place that goes round in it (slot.h). Three counters per member say how far it is:
 *
 *   arrived   its chunks below this ticket stand in its slots
 *   reduced   its part of the chunks below this ticket is reduced (reductions only)
 *   consumed     it has read all that it needs of the chunks below this ticket
 *
 * A slot may be written again once everyone has consumed the chunk that stood there. */
#ifndef ALLHANDS_SEGMENT_H
#define ALLHANDS_SEGMENT_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/codes.h"
#include "shm/nt_store.h"

/* Two cache lines: the prefetcher of common processors fetches them in pairs. */
#define AH_ALIGN 128

/* Copy in, reduce and copy out of three chunks go on at a time; one more lets a fast rank begin the next. */
#define AH_SLOTS 4

/* Threads of a rank beside the one that calls, at most: more gain little where memory is the limit. */
#define AH_MAX_HELPER_THREADS 3

/* A slot of a helper: a chunk of all_reduce. */
#define AH_HELPER_SLOT_BYTES ((size_t)64 << 10)

/* Calls of a rank that stand in its fingerprints, so how far a rank that waits for nobody can be ahead: where ranks outnumber
 * cores, so many calls are made between two changes of who has the core. */
#define AH_CALL_DEPTH 32

/* What a rank calls. Ranks compare it before they touch each other's data. */
struct ah_call {
    uint64_t sequence;
    uint64_t count;  /* bytes, or 0 where ranks may differ */
    uint16_t kind;   /* which operation */
    uint16_t reduce; /* which reduction, 0 for none */
    uint16_t dtype;
    int16_t root; /* -1 for none */
    uint64_t list_digest; /* of the sizes of a tensor list; 0 for a single tensor */
};

/* Data this inline_payload stands on the fingerprint, so that who reads the call has fetched the data, most of it in the same line. */
#define AH_INLINE_BYTES 72

/* Up to this it stands on the fingerprint's sheet: copying a page costs less than what else a call through the slots does. */
#define AH_PAYLOAD_BYTES ((size_t)4096)

/* In the place of the bytes on a fingerprint: what is moved goes through the slots. */
#define AH_NO_PAYLOAD UINT32_MAX

/* One call of one rank; see fingerprint.h. */
struct ah_fingerprint {
    /* The sequence after that of the call, once all of the fingerprint and its sheet is written. */
    alignas(AH_ALIGN) _Atomic uint32_t stamp;
    uint32_t bytes; /* of one part, where ranks may differ in it; AH_NO_PAYLOAD */
    struct ah_call call;
    unsigned char inline_payload[AH_INLINE_BYTES];
    /* Where the tensor lives, if in a window. Ranks may differ in it: then it goes through the slots. */
    uint64_t offset;
    uint32_t window; /* 0 for none */
};

struct ah_member {
    alignas(AH_ALIGN) _Atomic uint32_t arrived;
    _Atomic uint32_t reduced;
    _Atomic uint32_t consumed;
    _Atomic uint32_t left;  /* not 0: it makes no further call */
    _Atomic uint32_t read_failed; /* not 0: it could not read another's memory */
    /* Written by those who wait: on a line of its own, so that waiting does not slow the owner. */
    alignas(AH_ALIGN) _Atomic uint32_t waiters;
    _Atomic uint32_t wake_count;
    /* Seldom read by others, so that writing them costs the owner little. */
    alignas(AH_ALIGN) _Atomic uint32_t begun; /* it has begun its calls below this sequence */
    _Atomic uint32_t checked;                /* it needs no fingerprint of a call below this sequence */
    struct ah_fingerprint fingerprints[AH_CALL_DEPTH];
    /* Sizes that differ between ranks (uneven all_gather and all_to_all): one number for each. */
    alignas(AH_ALIGN) _Atomic uint64_t largest[AH_CALL_DEPTH];
};

struct ah_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint32_t helper_threads; /* of each rank */
    uint64_t slot_bytes; /* of one slot, without padding */
    uint64_t ring_bytes; /* of all its slots, how much a rank goes round in */
    uint32_t victim_l3;      /* not 0: see ah_has_victim_l3 */
    uint64_t total_bytes;
    unsigned char nonce[16];
    /* Not 0 once the group is over: an ah_outcome_code, and above its 8 bits the rank it is about. The first one stands,
     * so both are one word. */
    alignas(AH_ALIGN) _Atomic uint32_t ended;
};

/* Memory beside the segment that all ranks map: a region of `stride` bytes for each. */
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
    uint32_t uncompared; /* the first call that was not compared with everyone's */
    uint32_t reusable;    /* everyone needs no fingerprint of a call below this sequence */
    uint32_t synchronized;     /* after the last call in which everyone waited for everyone */
    int wake_due;       /* we published something and have not looked whether someone sleeps */
    int found_mismatch;        /* this rank itself found_mismatch the difference that ended the group */
    int64_t now_ns;      /* the time, where whoever begins a call has just asked for it; else 0 */
    int64_t deadline_ns; /* of the call that runs, on CLOCK_MONOTONIC */
    uint32_t culprit;    /* of the call that ended badly */
    uint32_t spins;      /* how often to look before giving the core away */
    uint32_t yields;     /* how often to give it away before sleeping */
    int *pidfds;         /* one for each rank, -1 for our own */
    const int *pids;     /* of each rank, to read its memory; NULL where that is not to be tried */
    const struct ah_window *windows;
    uint32_t windows_made;
    unsigned long long window_calls;  /* calls that were done in a window */
    unsigned long long single_copy_calls; /* calls that were done by reading the others' memory */
    struct ah_helper_threads *helper_threads;     /* NULL before the first call that they help with */
    /* Called now and then while waiting; not 0 breaks the call off, and the group with it. */
    int (*check_interrupt)(void *context);
    /* Called once, before a wait that may be long; NULL where there is nothing to let go of. */
    void (*on_long_wait)(void *context);
    void *context;
};

/* Bytes of a segment for `ranks` members with slots of `slot_bytes`, each with so many helper_threads. */
size_t ah_segment_bytes(uint32_t ranks, size_t slot_bytes, uint32_t helper_threads);

/* Whether slots are victim_l3 on this processor: what a core's second-level cache drives out goes to a third level that others write and
 * read as fast as their own. AMD's are, Intel's are not. */
int ah_has_victim_l3(void);

/* Write the header and zero the members; the memory is `ah_segment_bytes` of fresh, zeroed pages. */
void ah_segment_format(void *memory, uint32_t ranks, size_t slot_bytes, uint32_t helper_threads, int victim_l3, const unsigned char nonce[16]);

/* Look at a mapped segment as `rank`; AH_INVALID where it is not what it says. `pidfds` stays the caller's. */
int ah_segment_open(struct ah_group *group, void *memory, size_t bytes, uint32_t rank,
                    const unsigned char nonce[16], int *pidfds);

/* The group as helper number `helper` of our rank sees it: it ends with the group, and has members and slots of its own. */
void ah_segment_helper_view(const struct ah_group *group, uint32_t helper, struct ah_group *view);

static inline unsigned char *ah_slot(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    size_t index = (size_t)rank * AH_SLOTS + ticket % AH_SLOTS;

    return group->slots + index * group->slot_stride;
}

#endif
