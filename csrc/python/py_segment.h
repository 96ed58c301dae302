/* The Python type of a segment. */
#ifndef ALLHANDS_ENGINE_H
#define ALLHANDS_ENGINE_H

#include <Python.h>

#include "python/call_lock.h"
#include "shm/wait.h"

struct ah_segment {
    PyObject_HEAD
    struct ah_call_lock lock; /* first: see struct ah_locked */
    void *memory;
    size_t bytes;
    struct ah_group group;
    struct ah_p2p *p2p; /* of its Mail, NULL before there is one */
    int *pids; /* of each rank, NULL where its memory is not to be read */
    int pidfds[];
};

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_segment_type(void);

/* The object if it is a segment, else NULL (and no exception). */
struct ah_segment *ah_as_segment(PyObject *object);

/* segment_bytes and segment_format of _core.pyi. */
PyObject *ah_py_segment_bytes(PyObject *module, PyObject *args);
PyObject *ah_py_segment_format(PyObject *module, PyObject *args);

#endif
