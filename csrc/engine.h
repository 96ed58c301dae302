/* What engine.c gives to the module. */
#ifndef ALLHANDS_ENGINE_H
#define ALLHANDS_ENGINE_H

#include <Python.h>

PyObject *ah_segment_type(void);
PyObject *ah_py_segment_bytes(PyObject *module, PyObject *args);
PyObject *ah_py_reducible(PyObject *module, PyObject *args);
PyObject *ah_py_segment_format(PyObject *module, PyObject *args);

/* What is behind a Segment; it lives as long as that does. */
struct ah_group *ah_group_of(PyObject *segment);

#endif
