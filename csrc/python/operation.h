/* One operation with all that it is given, whoever asks for it and whatever moves its data; and Python's methods of an
 * object with a gate that ask for one. */
#ifndef ALLHANDS_MOVE_H
#define ALLHANDS_MOVE_H

#include <Python.h>

#include "recorder/flight_recorder.h"
#include "collectives/collective.h"

/* What an operation does not take is not looked at. */
struct ah_move {
    enum ah_operation_code kind;
    struct ah_part data;
    const struct ah_part *in, *out; /* a part for each rank; NULL where a rank gives or gets none */
    struct ah_bundle bundle;        /* in the place of `data`, where it has tensors */
    uint32_t dtype, reduction, root;
    int64_t limit_ns;
    const struct ah_note *note; /* of a call on the short way, NULL for any other */
};

/* An entry in a type's list of methods. */
#define AH_MOVE(name, text) {#name, (PyCFunction)(void (*)(void))ah_move_##name, METH_FASTCALL, text}

PyObject *ah_move_barrier(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_all_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_all_reduce_bundle(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_broadcast(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_all_gather(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_gather(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_reduce_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_move_all_to_all(PyObject *object, PyObject *const *args, Py_ssize_t n);

#endif
