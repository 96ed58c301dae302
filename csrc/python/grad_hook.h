/* Taking gradients as they come: the Python type allhands._core.Intake. */
#ifndef ALLHANDS_INTAKE_H
#define ALLHANDS_INTAKE_H

#include <Python.h>

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_grad_hook_type(void);

#endif
