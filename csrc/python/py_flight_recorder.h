/* The Python type of the flight recorder. */
#ifndef ALLHANDS_PY_FLIGHT_RECORDER_H
#define ALLHANDS_PY_FLIGHT_RECORDER_H

#include "python/object.h"

#include "recorder/flight_recorder.h"

struct ah_recorder_object {
    PyObject_HEAD
    void *memory;
    struct ah_flight_recorder recorder;
    unsigned long main_thread; /* identity of the main thread */
};

/* The object if it is a recorder, else NULL and no exception. */
struct ah_recorder_object *ah_as_recorder(PyObject *object);

#endif
