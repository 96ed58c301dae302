/* The Python type allhands._core.Mail. */
#ifndef ALLHANDS_POST_H
#define ALLHANDS_POST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A new reference; `module` also has the type Segment. */
PyObject *ah_p2p_type(PyObject *module);

#endif
