/* One operation with its arguments, and the methods of Python objects with a call lock that perform one. */
#ifndef ALLHANDS_MOVE_H
#define ALLHANDS_MOVE_H

#include <Python.h>

#include "recorder/flight_recorder.h"
#include "collectives/collective.h"

/* What an operation does not take is not looked at. */
struct ah_operation {
    enum ah_operation_code kind;
    struct ah_part data;
    const struct ah_part *in, *out; /* a part for each rank; NULL where a rank gives or gets none */
    struct ah_tensor_list tensors;        /* in the place of `data`, where it has tensors */
    uint32_t dtype, reduction, root;
    int64_t limit_ns;
    const struct ah_entry *entry; /* of a call on the fast path, else NULL */
};

/* An entry in a type's list of methods. */
#define AH_OPERATION_METHOD(name, text) {#name, (PyCFunction)(void (*)(void))ah_operation_##name, METH_FASTCALL, text}

PyObject *ah_operation_barrier(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_all_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_all_reduce_list(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_broadcast(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_all_gather(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_gather(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_reduce_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n);
PyObject *ah_operation_all_to_all(PyObject *object, PyObject *const *args, Py_ssize_t n);

#endif
