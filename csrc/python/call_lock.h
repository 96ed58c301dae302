/* The call lock of an engine: one call at a time, and what the fast path needs to know of the group. A Python object
 * with a call lock begins with struct ah_locked. */
#ifndef ALLHANDS_GATE_H
#define ALLHANDS_GATE_H

#include <Python.h>
#include <stdatomic.h>

#include "python/operation.h"
#include "python/py_flight_recorder.h"

/* Torch's names of groups are short; one that is not is cut at the front. */
#define AH_GROUP_NAME 24

struct ah_call_lock {
    uint32_t rank, size;
    const uint64_t *sequence; /* the number of the next call */
    /* Do an operation; `object` is the struct ah_locked. With the interpreter's lock held, which it lets go of. */
    int (*move)(void *object, struct ah_operation *move);
    PyThreadState *thread;    /* of the call that runs */
    _Atomic uint32_t turn;    /* not 0 while a call runs; see lock.c */
    unsigned int queued;      /* calls that wait for the lock: later ones queue behind them */
    int fast_path_closed;                 /* nonzero: the fast path is closed */
    int64_t limit_ns;         /* of a call on the fast path */
    PyObject *ranks;          /* a tuple of the global rank of each rank; NULL where they are the same */
    struct ah_recorder_object *recorder; /* an owned reference; NULL before the lock is configured */
    char name[AH_GROUP_NAME];
};

struct ah_locked {
    PyObject_HEAD
    struct ah_call_lock lock;
};

/* Run `call` without the interpreter's lock and keep its code. */
#define AH_WITHOUT_GIL(locked, code, call)                     \
    do {                                              \
        (locked)->lock.thread = PyEval_SaveThread();   \
        (code) = (call);                              \
        PyEval_RestoreThread((locked)->lock.thread);   \
    } while (0)

/* Let the handlers of signals run while a call waits; not 0 where one raised. `context` is a struct ah_locked. */
int ah_call_lock_check_signals(void *context);

/* The code of a call as a number; nothing where a handler raised. */
PyObject *ah_outcome_to_python(int code);

void ah_call_lock_init(struct ah_call_lock *lock, uint32_t rank, uint32_t size, const uint64_t *sequence,
                  int (*move)(void *object, struct ah_operation *move));

void ah_call_lock_clear(struct ah_call_lock *lock);

/* Try to take the lock; nonzero if it was free. */
int ah_call_lock_try(struct ah_call_lock *lock);
void ah_call_lock_release(struct ah_call_lock *lock);

/* Methods of Python objects with a call lock. `configure_fast_path` sets the timeout, the group's name, the global
 * ranks (None: equal to the group ranks) and the flight recorder; the fast path is closed before. */
PyObject *ah_call_lock_enter(PyObject *object, PyObject *none);
PyObject *ah_call_lock_exit(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_call_lock_sequence(PyObject *object, PyObject *none);
PyObject *ah_call_lock_configure(PyObject *object, PyObject *const *args, Py_ssize_t n);

#endif
