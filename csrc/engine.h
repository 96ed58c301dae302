/* The Python type of a segment. */
#ifndef ALLHANDS_ENGINE_H
#define ALLHANDS_ENGINE_H

#include <Python.h>
#include <pythread.h>

#include "notice.h"
#include "wait.h"

/* Torch's names of groups are short; one that is not is cut at the front. */
#define AH_GROUP_NAME 24

struct ah_segment {
    PyObject_HEAD
    void *memory;
    size_t bytes;
    struct ah_group group;
    PyThreadState *thread;   /* of the call that runs */
    PyThread_type_lock turn; /* held while a call runs */
    unsigned int queued;     /* calls that wait for their turn: whoever comes now comes after them */
    int shut;                /* not 0: no more calls of the short way */
    int64_t limit_ns;        /* of a call of the short way */
    PyObject *ranks;         /* a tuple of the global rank of each rank; NULL where they are the same */
    struct ah_mail *mail; /* of its Mail, NULL before there is one */
    PyObject *board;
    struct ah_notice *notice; /* the same */
    int *pids; /* of each rank, NULL where its memory is not to be read */
    char name[AH_GROUP_NAME];
    int pidfds[];
};

/* Run `call` without the interpreter's lock and keep its code. */
#define AH_RUN(segment, code, call)              \
    do {                                         \
        (segment)->thread = PyEval_SaveThread(); \
        (code) = (call);                         \
        PyEval_RestoreThread((segment)->thread); \
    } while (0)

/* The same for what moves little: the lock is let go of only where others have to be waited for. */
#define AH_RUN_SHORT(segment, code, call)                \
    do {                                                 \
        (segment)->group.let_go = ah_let_go;             \
        (code) = (call);                                 \
        if ((segment)->group.let_go)                     \
            (segment)->group.let_go = NULL;              \
        else                                             \
            PyEval_RestoreThread((segment)->thread);     \
    } while (0)

/* Let go of the interpreter's lock; `context` is a segment. */
void ah_let_go(void *context);

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_segment_type(void);

/* The object if it is a segment, else NULL (and no exception). */
struct ah_segment *ah_as_segment(PyObject *object);

#endif
