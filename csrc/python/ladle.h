/* Hands the results in a pool to torch, as tensors. The Python type allhands._core.Pool. */
#ifndef ALLHANDS_LADLE_H
#define ALLHANDS_LADLE_H

#include <Python.h>

#include "collectives/collective.h"

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_ladle_type(void);

/* Say in which pool of the group the results of `bundle` may go, if there is one for it. With the interpreter's lock held, because pools
 * come and go with it; the caller keeps the tensors, and so the pool, until the call is over. */
void ah_find_pool(const struct ah_group *group, struct ah_bundle *bundle);

#endif
