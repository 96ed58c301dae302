/* What the short way has to know of a group, whatever moves its data: whose turn it is, and what a call is called. A
 * Python object that has a gate begins with it (struct ah_gated). */
#ifndef ALLHANDS_GATE_H
#define ALLHANDS_GATE_H

#include <Python.h>
#include <stdatomic.h>

#include "python/operation.h"
#include "python/py_flight_recorder.h"

/* Torch's names of groups are short; one that is not is cut at the front. */
#define AH_GROUP_NAME 24

struct ah_gate {
    uint32_t rank, size;
    const uint64_t *sequence; /* the number of the next call */
    /* Do an operation; `mover` is the struct ah_gated. With the interpreter's lock held, which it lets go of. */
    int (*move)(void *mover, struct ah_move *move);
    PyThreadState *thread;    /* of the call that runs */
    _Atomic uint32_t turn;    /* not 0 while a call runs; see gate.c */
    unsigned int queued;      /* calls that wait for their turn: whoever comes now comes after them */
    int shut;                 /* not 0: no more calls of the short way */
    int64_t limit_ns;         /* of a call of the short way */
    PyObject *ranks;          /* a tuple of the global rank of each rank; NULL where they are the same */
    PyObject *board;
    struct ah_notice *notice; /* the same; NULL before the group is introduced */
    char name[AH_GROUP_NAME];
};

struct ah_gated {
    PyObject_HEAD
    struct ah_gate gate;
};

/* Run `call` without the interpreter's lock and keep its code. */
#define AH_RUN(gated, code, call)                     \
    do {                                              \
        (gated)->gate.thread = PyEval_SaveThread();   \
        (code) = (call);                              \
        PyEval_RestoreThread((gated)->gate.thread);   \
    } while (0)

/* Let the handlers of signals run while a call waits; not 0 where one raised. `context` is a struct ah_gated. */
int ah_gate_pulse(void *context);

/* The code of a call as a number; nothing where a handler raised. */
PyObject *ah_gate_ended(int code);

void ah_gate_open(struct ah_gate *gate, uint32_t rank, uint32_t size, const uint64_t *sequence,
                  int (*move)(void *mover, struct ah_move *move));

void ah_gate_close(struct ah_gate *gate);

/* Whether it is our turn now: nobody had it, and whoever comes waits until it is given back. */
int ah_gate_take(struct ah_gate *gate);
void ah_gate_give(struct ah_gate *gate);

/* Python's methods of an object with a gate. `introduce` says what the short way has to know: the limit of a call, the
 * group's name, the global ranks (None: the same), and the board to write on. It is not taken before. */
PyObject *ah_gate_enter(PyObject *object, PyObject *none);
PyObject *ah_gate_leave(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_gate_sequence(PyObject *object, PyObject *none);
PyObject *ah_gate_introduce(PyObject *object, PyObject *const *args, Py_ssize_t n);

#endif
