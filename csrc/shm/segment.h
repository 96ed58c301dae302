/* The shared segment of one group on one host: its layout, and a process's view of it.
 *
 *   header | member 0 … member n-1 | sheets of each | slots of each | mail (inbox.h) | members and slots of each hand (hands.h)
 *
 * A member writes only its own part (but for `waiters`), everyone reads all of it. Data moves in chunks that
 * carry a running number, the ticket; every rank takes the same tickets in the same order, because every rank
 * makes the same calls (they are compared before data is touched). Chunk t of a member stands in its slot
 * t % AH_DEPTH, at a place that goes round in it (slot.h). Three counters per member say how far it is:
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

#include "shm/codes.h"
#include "shm/nt_store.h"

/* Two cache lines: the prefetcher of common processors fetches them in pairs. */
#define AH_LINE 128

/* Copy in, reduce and copy out of three chunks go on at a time; one more lets a fast rank begin the next. */
#define AH_DEPTH 4

/* Threads of a rank beside the one that calls, at most: more gain little where memory is the limit. */
#define AH_MOST_HANDS 3

/* A slot of a hand: a chunk of all_reduce. */
#define AH_HAND_SLOT ((size_t)64 << 10)

/* Calls of a rank that stand in its cards, so how far a rank that waits for nobody can be ahead: where ranks outnumber
 * cores, so many calls are made between two changes of who has the core. */
#define AH_CALLS 32

/* What a rank calls. Ranks compare it before they touch each other's data. */
struct ah_call {
    uint64_t sequence;
    uint64_t count;  /* bytes, or 0 where ranks may differ */
    uint16_t kind;   /* which operation */
    uint16_t reduce; /* which reduction, 0 for none */
    uint16_t dtype;
    int16_t root; /* -1 for none */
};

/* Data this small stands on the card, so that who reads the call has fetched the data, most of it in the same line. */
#define AH_SMALL 80

/* Up to this it stands on the card's sheet: copying a page costs less than what else a call through the slots does. */
#define AH_SHEET_BYTES ((size_t)4096)

/* In the place of the bytes on a card: what is moved goes through the slots. */
#define AH_LONG UINT32_MAX

/* One call of one rank; see card.h. */
struct ah_card {
    /* The sequence after that of the call, once all of the card and its sheet is written. */
    alignas(AH_LINE) _Atomic uint32_t stamp;
    uint32_t bytes; /* of one part, where ranks may differ in it; AH_LONG */
    struct ah_call call;
    unsigned char small[AH_SMALL];
    /* Where the tensor lives, if in a window. Ranks may differ in it: then it goes through the slots. */
    uint64_t offset;
    uint32_t window; /* 0 for none */
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
    /* Seldom read by others, so that writing them costs the owner little. */
    alignas(AH_LINE) _Atomic uint32_t noted; /* it has begun its calls below this sequence */
    _Atomic uint32_t checked;                /* it needs no card of a call below this sequence */
    struct ah_card cards[AH_CALLS];
    /* Sizes that differ between ranks (uneven all_gather and all_to_all): one number for each. */
    alignas(AH_LINE) _Atomic uint64_t largest[AH_CALLS];
};

struct ah_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint32_t hands; /* of each rank */
    uint64_t slot_bytes; /* of one slot, without padding */
    uint64_t ring_bytes; /* of all its slots, how much a rank goes round in */
    uint32_t swift;      /* not 0: see ah_is_swift */
    uint64_t total_bytes;
    unsigned char nonce[16];
    /* Not 0 once the group is over: an ah_outcome_code, and above its 8 bits the rank it is about. The first one stands,
     * so both are one word. */
    alignas(AH_LINE) _Atomic uint32_t ended;
};

/* Memory beside the segment that all ranks map: a region of `stride` bytes for each. */
struct ah_window {
    unsigned char *base;
    size_t stride;
    uint32_t id; /* the same on every rank: windows are made by all ranks together */
    const struct ah_window *next;
};

struct ah_hands;

struct ah_group {
    struct ah_header *head;
    struct ah_member *members;
    unsigned char *sheets;
    unsigned char *slots;
    size_t slot_bytes;
    size_t slot_stride; /* from one slot to the next: a page more, against power-of-two aliasing */
    size_t ring_bytes;
    int swift;
    struct ah_store store; /* to our slots */
    unsigned char *mail;
    uint32_t rank;
    uint32_t ranks;
    uint32_t ticket;
    uint64_t sequence;
    struct ah_call call;
    uint32_t pending; /* the first call that was not compared with everyone's */
    uint32_t room;    /* everyone needs no card of a call below this sequence */
    uint32_t met;     /* after the last call in which everyone waited for everyone */
    int unrung;       /* we published something and have not looked whether someone sleeps */
    int found;        /* this rank itself found the difference that ended the group */
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
    struct ah_hands *hands;     /* NULL before the first call that they help with */
    /* Called now and then while waiting; not 0 breaks the call off, and the group with it. */
    int (*pulse)(void *context);
    /* Called once, before a wait that may be long; NULL where there is nothing to let go of. */
    void (*let_go)(void *context);
    void *context;
};

/* Bytes of a segment for `ranks` members with slots of `slot_bytes`, each with so many hands. */
size_t ah_segment_bytes(uint32_t ranks, size_t slot_bytes, uint32_t hands);

/* Whether slots are swift on this processor: what a core's second-level cache drives out goes to a third level that others write and
 * read as fast as their own. AMD's are, Intel's are not. */
int ah_is_swift(void);

/* Write the header and zero the members; the memory is `ah_segment_bytes` of fresh, zeroed pages. */
void ah_segment_format(void *memory, uint32_t ranks, size_t slot_bytes, uint32_t hands, int swift, const unsigned char nonce[16]);

/* Look at a mapped segment as `rank`; AH_INVALID where it is not what it says. `pidfds` stays the caller's. */
int ah_segment_open(struct ah_group *group, void *memory, size_t bytes, uint32_t rank,
                    const unsigned char nonce[16], int *pidfds);

/* The group as hand number `hand` of our rank sees it: it ends with the group, and has members and slots of its own. */
void ah_segment_hand(const struct ah_group *group, uint32_t hand, struct ah_group *view);

static inline unsigned char *ah_slot(const struct ah_group *group, uint32_t rank, uint32_t ticket)
{
    size_t index = (size_t)rank * AH_DEPTH + ticket % AH_DEPTH;

    return group->slots + index * group->slot_stride;
}

#endif
