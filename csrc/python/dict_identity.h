/* Who stands in some dicts: asked before every pass of a model, of the tables in which torch keeps parameters, modules and buffers. */
#ifndef ALLHANDS_ROSTER_H
#define ALLHANDS_ROSTER_H

#include <Python.h>

/* inhabitants(tables): see _core.pyi. */
PyObject *ah_py_dict_identity(PyObject *module, PyObject *tables);

#endif
