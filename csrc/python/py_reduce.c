/* Reducing memory that Python has gathered: takes the arguments apart and lets go of the interpreter meanwhile. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/py_reduce.h"

#include <stdint.h>
#include <stdlib.h>

#include "shm/reduce.h"

/* So many bytes take less time than letting go of the interpreter and getting it back, where others want it. */
#define SHORT_BYTES ((size_t)4 << 10)

PyObject *ah_py_reduce(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long out, bytes;
    unsigned int dtype, reduction;
    const void **sources;
    PyThreadState *thread;
    Py_ssize_t number;
    PyObject *given;
    size_t each;

    if (!PyArg_ParseTuple(args, "IIKO!K:reduce", &dtype, &reduction, &out, &PyTuple_Type, &given, &bytes))
        return NULL;
    dtype &= ~AH_COMPLEX;
    number = PyTuple_Size(given);
    each = ah_dtype_bytes(dtype);
    if (number < 1 || number > UINT32_MAX || each == 0 || bytes % each != 0 || !ah_reducible(dtype, reduction)) {
        PyErr_SetString(PyExc_ValueError, "reduce(dtype, reduction, out, sources, bytes)");
        return NULL;
    }
    sources = malloc((size_t)number * sizeof *sources);
    if (!sources)
        return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < number; index++) {
        sources[index] = PyLong_AsVoidPtr(PyTuple_GetItem(given, index));
        if (PyErr_Occurred()) {
            free(sources);
            return NULL;
        }
    }
    thread = bytes > SHORT_BYTES ? PyEval_SaveThread() : NULL;
    ah_reduce(dtype, reduction, (void *)(uintptr_t)out, sources, (uint32_t)number, (size_t)bytes / each);
    if (thread)
        PyEval_RestoreThread(thread);
    free(sources);
    Py_RETURN_NONE;
}

PyObject *ah_py_reducible(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int dtype, reduction;

    if (!PyArg_ParseTuple(args, "II:reducible", &dtype, &reduction))
        return NULL;
    return PyBool_FromLong(ah_reducible(dtype, reduction));
}
