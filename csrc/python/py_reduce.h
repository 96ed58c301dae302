/* Reducing memory that Python has gathered: what `ah_reduce` does, for engines that move data by other means. */
#ifndef ALLHANDS_SUM_H
#define ALLHANDS_SUM_H

#include <Python.h>

/* reduce(dtype, reduction, out, sources, bytes): see _core.pyi. */
PyObject *ah_py_reduce(PyObject *module, PyObject *args);

/* reducible(dtype, reduction): see _core.pyi. */
PyObject *ah_py_reducible(PyObject *module, PyObject *args);

#endif
