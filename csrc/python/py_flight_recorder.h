/* The Python type of the recorder. */
#ifndef ALLHANDS_NOTICE_H
#define ALLHANDS_NOTICE_H

#include <Python.h>

#include "recorder/flight_recorder.h"

struct ah_recorder_object {
    PyObject_HEAD
    void *memory;
    struct ah_flight_recorder recorder;
    unsigned long main_thread; /* the identity of the main thread */
};

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_recorder_type(void);

/* The object if it is a recorder, else NULL (and no exception). */
struct ah_recorder_object *ah_as_recorder(PyObject *object);

/* Note the shape, up to what there is room for; `shape` is a tuple of ints. */
int ah_entry_set_shape(struct ah_entry *entry, PyObject *shape);

#endif
