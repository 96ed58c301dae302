/* The Python type allhands._core.Segment: the shared memory of a group as one rank sees it, the call lock, and what
 * the fast path needs to know of the group. */
#ifndef ALLHANDS_PY_SEGMENT_H
#define ALLHANDS_PY_SEGMENT_H

#include "python/object.h"

#include "collectives/collective.h"
#include "python/call_lock.h"
#include "python/py_flight_recorder.h"
#include "shm/wait.h"

/* torch's group names are short; a longer one is cut at the front. */
#define AH_GROUP_NAME 24

struct ah_segment {
    PyObject_HEAD
    struct ah_group group;
    PyThreadState *thread; /* of the running call, while it does not hold the GIL */
    struct ah_call_lock lock;
    unsigned int queued; /* calls that wait for the lock: calls of the fast path queue behind them */
    int fast_path_closed;
    int64_t limit_ns; /* timeout of a call on the fast path */
    PyObject *ranks;  /* tuple: the global rank of each rank; NULL where they are equal */
    struct ah_recorder_object *recorder; /* owned; NULL before configure_fast_path: the fast path is closed */
    char name[AH_GROUP_NAME];
    void *memory;
    size_t bytes;
    struct ah_p2p *p2p; /* of its P2P object, NULL before there is one */
    int *pids;          /* of each rank; NULL without single copy */
    int pidfds[];
};

/* A collective with its arguments. Each kind reads only those that it has. */
struct ah_operation {
    enum ah_operation_code kind;
    struct ah_part data;
    const struct ah_part *in, *out; /* a part for each rank; NULL where a rank has none */
    struct ah_tensor_list tensors;  /* instead of `data`, if not empty */
    uint32_t dtype, reduction, root;
    int64_t limit_ns;
    const struct ah_entry *entry; /* of a call on the fast path, else NULL */
};

/* The object if it is a segment, else NULL and no exception. */
struct ah_segment *ah_as_segment(PyObject *object);

/* Perform an operation and return its outcome. The caller holds the GIL, which is released meanwhile, and the call
 * lock. */
int ah_segment_run(struct ah_segment *self, struct ah_operation *operation);

/* Run signal handlers; nonzero if one raised. `context` is a PyThreadState *, which is replaced. */
int ah_check_signals(void *context);

/* segment_bytes and segment_format of _core.pyi. */
PyObject *ah_py_segment_bytes(PyObject *module, PyObject *args);
PyObject *ah_py_segment_format(PyObject *module, PyObject *args);

#endif
