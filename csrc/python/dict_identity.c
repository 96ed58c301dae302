#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/dict_identity.h"

#include <string.h>

/* Write the addresses of the values of `table` to `to`, which has room for `room`. */
static void entry(PyObject *table, char *to, Py_ssize_t room)
{
    PyObject *value;
    Py_ssize_t place = 0;

    for (; room > 0 && PyDict_Next(table, &place, NULL, &value); room--, to += sizeof value)
        memcpy(to, &value, sizeof value);
}

PyObject *ah_py_dict_identity(PyObject *Py_UNUSED(module), PyObject *tables)
{
    Py_ssize_t number = PyList_Check(tables) ? PyList_Size(tables) : -1, all = 0;
    PyObject *found;
    char *to;

    for (Py_ssize_t index = 0; index < number; index++) {
        PyObject *table = PyList_GetItem(tables, index);

        if (!PyDict_Check(table))
            number = -1;
        else
            all += PyDict_Size(table);
    }
    if (number < 0) {
        PyErr_SetString(PyExc_TypeError, "dict_identity(a list of dicts)");
        return NULL;
    }
    found = PyBytes_FromStringAndSize(NULL, all * (Py_ssize_t)sizeof(PyObject *));
    if (!found)
        return NULL;
    to = PyBytes_AsString(found);
    for (Py_ssize_t index = 0; index < number; index++) {
        PyObject *table = PyList_GetItem(tables, index);

        entry(table, to, PyDict_Size(table));
        to += PyDict_Size(table) * (Py_ssize_t)sizeof(PyObject *);
    }
    return found;
}
