#include "python/args.h"

#include <stdlib.h>

#include "shm/tensor_list.h"

int ah_as_part(PyObject *address, PyObject *bytes, struct ah_part *part)
{
    void *data = PyLong_AsVoidPtr(address);

    /* A tensor without elements may have no address; arithmetic on none is not defined. */
    part->data = data ? data : (unsigned char *)"";
    part->bytes = PyLong_AsSize_t(bytes);
    part->window = NULL;
    return PyErr_Occurred() ? -1 : 0;
}

int ah_as_parts(uint32_t ranks, PyObject *given, struct ah_part **parts)
{
    *parts = NULL;
    if (given == Py_None)
        return 0;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != (Py_ssize_t)ranks * 2) {
        PyErr_SetString(PyExc_ValueError, "a part for each rank: (address, bytes) * ranks");
        return -1;
    }
    *parts = calloc(ranks, sizeof **parts);
    if (!*parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (ah_as_part(PyTuple_GetItem(given, 2 * rank), PyTuple_GetItem(given, 2 * rank + 1), &(*parts)[rank]) != 0) {
            free(*parts);
            *parts = NULL; /* which the caller frees */
            return -1;
        }
    }
    return 0;
}

int ah_as_tensor_list(PyObject *given, struct ah_tensor_list *tensors)
{
    Py_ssize_t size = PyTuple_Check(given) ? PyTuple_Size(given) : 0;

    if (size == 0 || size % 2 != 0) {
        PyErr_SetString(PyExc_ValueError, "some tensors: (address, bytes) * number");
        return -1;
    }
    if (ah_tensor_list_alloc(tensors, (size_t)size / 2) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t index = 0; index < tensors->number; index++) {
        Py_ssize_t at = 2 * (Py_ssize_t)index;

        if (ah_as_part(PyTuple_GetItem(given, at), PyTuple_GetItem(given, at + 1), &tensors->parts[index]) != 0) {
            ah_tensor_list_free(tensors);
            return -1;
        }
    }
    ah_tensor_list_set_ends(tensors);
    return 0;
}

int ah_as_uint32(PyObject *given, uint32_t *number)
{
    unsigned long value = PyLong_AsUnsignedLong(given);

    *number = (uint32_t)value;
    return PyErr_Occurred() ? -1 : 0;
}

int ah_as_int64(PyObject *given, int64_t *nanoseconds)
{
    *nanoseconds = PyLong_AsLongLong(given);
    return PyErr_Occurred() ? -1 : 0;
}

int ah_check_argument_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return -1;
}
