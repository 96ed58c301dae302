/* One call on the fast path: arguments, flight recorder entry, lock and outcome. */
#ifndef ALLHANDS_CALL_H
#define ALLHANDS_CALL_H

#include "python/torch_facts.h"

/* What a parameter is for; the Python side knows them by these numbers. */
enum role { OUT, IN, OP, GROUP, ASYNC, PEER, GROUP_PEER, TAG, OTHER, ROLES };

/* Result of the fast path; SLOW_PATH: nothing was done. */
enum outcome { DONE = 0, SLOW_PATH = 1, RAISED = -1 };

struct ah_fast_call {
    struct ah_torch_facts *facts;
    struct ah_locked *locked;     /* what moves the data of the group */
    struct ah_segment *segment; /* the same */
    PyObject *group;
    PyObject *given[ROLES]; /* borrowed; NULL where not given */
    const char *name; /* a whole field of a entry */
    struct ah_entry *entry;
    uint64_t number;
    int64_t began_ns;
    int whole;
    long answer; /* the rank that sent the message */
    struct ah_part out[AH_MAX_RANKS], in[AH_MAX_RANKS];
};

/* The rank in the group that the call names, given as one there or as a global one; `fallback` (if it is not negative)
 * where none is given. */
int ah_fast_call_peer(const struct ah_fast_call *call, int fallback, uint32_t *rank);

/* Write the entry of the call, about the tensor `shown`. */
int ah_fast_call_record(struct ah_fast_call *call, const struct ah_tensor *shown, uint32_t reduction, int32_t root);

/* Close the entry and let the group raise what went wrong; `peer` is that of a message, -1 for a collective. */
int ah_fast_call_finish(struct ah_fast_call *call, int code, uint32_t culprit, int peer);

/* Do an operation with the tensor `shown` (NULL for none): take the turn, write the entry, move, give the turn back and
 * conclude. `move` has the kind, the reduction and the parts for each rank; the rest is filled in. No root is -1. */
int ah_fast_call_run(struct ah_fast_call *call, const struct ah_tensor *shown, int32_t root, struct ah_operation *move);

/* A tensor for each rank, all of one type, that of `first`. */
int ah_fast_call_parts(const struct ah_fast_call *call, PyObject *list, struct ah_part *parts, struct ah_tensor *first);

/* One tensor cut into equal parts, of `bytes` each. */
int ah_fast_call_split(const struct ah_fast_call *call, struct ah_tensor whole, size_t bytes, struct ah_part *parts);

#endif
