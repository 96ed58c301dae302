/* One call on the short way: what it was given, its note, its turn and its end. */
#ifndef ALLHANDS_CALL_H
#define ALLHANDS_CALL_H

#include "python/torch_facts.h"

/* What a parameter is for; the Python side knows them by these numbers. */
enum role { OUT, IN, OP, GROUP, ASYNC, PEER, GROUP_PEER, TAG, OTHER, ROLES };

/* How far a call came on the short way. */
enum outcome { DONE = 0, NOT_OURS = 1, RAISED = -1 };

struct ah_quick_call {
    struct ah_way *way;
    struct ah_gated *gated;     /* what moves the data of the group */
    struct ah_segment *segment; /* the same; NULL where that is MPI */
    PyObject *group;
    PyObject *given[ROLES]; /* borrowed; NULL where not given */
    const char *name; /* a whole field of a note */
    struct ah_note *note;
    uint64_t number;
    int64_t began_ns;
    int whole;
    long answer; /* the rank that a message came from */
    struct ah_part out[AH_MOST_RANKS], in[AH_MOST_RANKS];
};

/* The rank in the group that the call names, given as one there or as a global one; `fallback` (if it is not negative)
 * where none is given. */
int ah_call_peer(const struct ah_quick_call *call, int fallback, uint32_t *rank);

/* Write the note of the call, about the tensor `shown`. */
int ah_call_announce(struct ah_quick_call *call, const struct ah_plain *shown, uint32_t reduction, int32_t root);

/* Close the note and let the group raise what went wrong; `peer` is that of a message, -1 for a collective. */
int ah_call_conclude(struct ah_quick_call *call, int code, uint32_t culprit, int peer);

/* Do an operation with the tensor `shown` (NULL for none): take the turn, write the note, move, give the turn back and
 * conclude. `move` has the kind, the reduction and the parts for each rank; the rest is filled in. No root is -1. */
int ah_call_move(struct ah_quick_call *call, const struct ah_plain *shown, int32_t root, struct ah_move *move);

/* A tensor for each rank, all of one type, that of `first`. */
int ah_call_list(const struct ah_quick_call *call, PyObject *list, struct ah_part *parts, struct ah_plain *first);

/* One tensor cut into equal parts, of `bytes` each. */
int ah_call_cut(const struct ah_quick_call *call, struct ah_plain whole, size_t bytes, struct ah_part *parts);

#endif
