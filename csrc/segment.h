/* The shared segment of one group on one host: its layout, and a process's view of it.
 *
 *   header | member 0 … member n-1 | slots of member 0 … slots of member n-1 | mail (inbox.h)
 *
 * A member writes only its own part (but for `waiters`), everyone reads all of it. Data moves in chunks that
 * carry a running number, the ticket; every rank takes the same tickets in the same order, because every rank
 * makes the same calls (they are compared before data is touched). Chunk t of a member stands in its slot
 * t % AH_DEPTH. Three counters per member say how far it is:
 *
 *   arrived   its chunks below this ticket stand in its slots
 *   reduced   its part of the chunks below this ticket is reduced (reductions only)
 *   taken     it has read all that it needs of the chunks below this ticket
 *
 * A slot may be written again once everyone has taken the chunk that stood there. */
#ifndef ALLHANDS_SEGMENT_H
#define ALLHANDS_SEGMENT_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Two cache lines: the prefetcher of common processors fetches them in pairs. */
#define AH_LINE 128

/* Copy in, reduce and copy out of three chunks go on at a time; one more lets a fast rank begin the next. */
#define AH_DEPTH 4

/* Calls that a rank may be ahead of another: rooted operations let a writer run ahead by as many chunks as
 * there are slots, and each call takes at least one. */
#define AH_CALLS (2 * AH_DEPTH)

/* What a rank calls. Ranks compare it before they touch each other's data. */
struct ah_call {
    uint64_t sequence;
    uint64_t count;  /* elements, or 0 where ranks may differ */
    uint32_t kind;   /* which operation */
    uint32_t reduce; /* which reduction, 0 for none */
    uint32_t dtype;
    int32_t root; /* -1 for none */
    /* Where the tensor lives, if in a window. Ranks may differ in it: then it goes through the slots. */
    uint32_t window; /* 0 for none */
    uint64_t offset; /* in the window; with none, the address that others may read */
};

/* A tensor this small stands beside its call, so that who reads the one has fetched the other. */
#define AH_SMALL 64

struct ah_entry {
    alignas(AH_LINE) struct ah_call call;
    unsigned char small[AH_SMALL];
};

struct ah_member {
    alignas(AH_LINE) _Atomic uint32_t arrived;
    _Atomic uint32_t reduced;
    _Atomic uint32_t taken;
    _Atomic uint32_t departed;  /* not 0: it makes no further call */
    _Atomic uint32_t unreached; /* not 0: it could not read another's memory */
    /* Written by those who wait: on a line of its own, so that waiting does not slow the owner. */
    alignas(AH_LINE) _Atomic uint32_t waiters;
    _Atomic uint32_t bell;
    struct ah_entry calls[AH_CALLS];
    /* Its calls below this sequence stand in `calls`, whether it got as far as arriving or not. */
    _Atomic uint64_t noted;
    /* Sizes that differ between ranks (uneven all_gather and all_to_all): one number for each. */
    alignas(AH_LINE) _Atomic uint64_t largest[AH_CALLS];
};

struct ah_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t slot_bytes;  /* of one slot, without padding */
    uint64_t slot_stride; /* from one slot to the next: a page more, against power-of-two aliasing */
    uint64_t total_bytes;
    unsigned char nonce[16];
    /* Not 0 once the group is over: an ah_code, and above its 8 bits the rank it is about. The first one stands,
     * so both are one word. */
    alignas(AH_LINE) _Atomic uint32_t ended;
};

/* How a call ended. Python writes the sentences. */
enum ah_code {
    AH_OK = 0,
    AH_TIMEOUT = 1,  /* `culprit` did not come in time */
    AH_DEAD = 2,     /* the process of `culprit` ended */
    AH_ABORTED = 3,  /* someone called abort */
    AH_MISMATCH = 4, /* `culprit` called something else */
    AH_BROKEN = 5,   /* not a segment of ours, or an argument that makes no sense */
    AH_INTERRUPTED = 6, /* `pulse` said so: a signal's handler raised */
    AH_DEPARTED = 7,    /* `culprit` left the group in good order */
};

/* Memory beside the segment that all ranks map: a region of `stride` bytes for each. */
struct ah_window {
    unsigned char *base;
    size_t stride;
    uint32_t id; /* the same on every rank: windows are made by all ranks together */
    const struct ah_window *next;
};

struct ah_group {
    struct ah_header *head;
    struct ah_member *members;
    unsigned char *slots;
    unsigned char *mail;
    uint32_t rank;
    uint32_t ranks;
    uint32_t ticket;
    uint64_t sequence;
    struct ah_call call;
    int64_t now_ns;      /* the time, where whoever begins a call has just asked for it; else 0 */
    int64_t deadline_ns; /* of the call that runs, on CLOCK_MONOTONIC */
    uint32_t culprit;    /* of the call that ended badly */
    uint32_t spins;      /* how often to look before giving the core away */
    uint32_t yields;     /* how often to give it away before sleeping */
    int *pidfds;         /* one for each rank, -1 for our own */
    const int *pids;     /* of each rank, to read its memory; NULL where that is not to be tried */
    const struct ah_window *windows;
    uint32_t windows_made;
    unsigned long long direct;  /* calls that were done in a window */
    unsigned long long reached; /* calls that were done by reading the others' memory */
    /* Called now and then while waiting; not 0 breaks the call off, and the group with it. */
    int (*pulse)(void *context);
    /* Called once, before a wait that may be long; NULL where there is nothing to let go of. */
    void (*let_go)(void *context);
    void *context;
};

/* Bytes of a segment for `ranks` members with slots of `slot_bytes`. */
size_t ah_segment_bytes(uint32_t ranks, size_t slot_bytes);

/* Write the header and zero the members; the memory is `ah_segment_bytes` of fresh, zeroed pages. */
void ah_segment_format(void *memory, uint32_t ranks, size_t slot_bytes, const unsigned char nonce[16]);

/* Look at a mapped segment as `rank`; AH_BROKEN where it is not what it says. `pidfds` stays the caller's. */
int ah_segment_open(struct ah_group *group, void *memory, size_t bytes, uint32_t rank,
                    const unsigned char nonce[16], int *pidfds);

static inline unsigned char *ah_slot(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    size_t index = (size_t)rank * AH_DEPTH + ticket % AH_DEPTH;

    return group->slots + index * group->head->slot_stride;
}

#endif
