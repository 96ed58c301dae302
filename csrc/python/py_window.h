/* A window: memory that all ranks of a group share, one region of equal size for each. A tensor that lives in its
 * rank's region needs no staging: the others read and write it where it is. The Python type allhands._core.Window. */
#ifndef ALLHANDS_WINDOW_H
#define ALLHANDS_WINDOW_H

#include <Python.h>

#include "collectives/collective.h"
#include "python/py_segment.h"

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_window_type(void);

/* Say where in a window of the group `part` lives, if it does. With the interpreter's lock held, because windows come
 * and go with it; the caller keeps the tensor, and so the window, until the call is over. */
void ah_find_window(const struct ah_group *group, struct ah_part *part);

#endif
