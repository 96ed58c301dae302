/* The Python type of a ferry. */
#ifndef ALLHANDS_HARBOUR_H
#define ALLHANDS_HARBOUR_H

#include <Python.h>

#include "mpi/ferry.h"
#include "python/call_lock.h"

struct ah_harbour {
    PyObject_HEAD
    struct ah_call_lock lock; /* first: see struct ah_locked */
    struct ah_ferry ferry;
    PyObject *port;
};

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_harbour_type(void);

/* The object if it is one, else NULL (and no exception). */
struct ah_harbour *ah_as_harbour(PyObject *object);

#endif
