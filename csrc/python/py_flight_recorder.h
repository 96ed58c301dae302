/* The Python type of the board. */
#ifndef ALLHANDS_NOTICE_H
#define ALLHANDS_NOTICE_H

#include <Python.h>

#include "recorder/flight_recorder.h"

struct ah_notice {
    PyObject_HEAD
    void *memory;
    struct ah_board board;
    unsigned long main; /* the identity of the main thread */
};

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_notice_type(void);

/* The object if it is a board, else NULL (and no exception). */
struct ah_notice *ah_as_notice(PyObject *object);

/* Note the shape, up to what there is room for; `shape` is a tuple of ints. */
int ah_note_shape(struct ah_note *note, PyObject *shape);

#endif
