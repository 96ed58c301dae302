#ifndef ALLHANDS_MAKER_H
#define ALLHANDS_MAKER_H

#include <Python.h>

PyObject *ah_py_segment_bytes(PyObject *module, PyObject *args);
PyObject *ah_py_wall_bytes(PyObject *module, PyObject *args);
PyObject *ah_py_segment_format(PyObject *module, PyObject *args);
PyObject *ah_py_reducible(PyObject *module, PyObject *args);

#endif
