#ifndef ALLHANDS_QUICK_H
#define ALLHANDS_QUICK_H

#include <Python.h>

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_fast_path_type(void);

#endif
