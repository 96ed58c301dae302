/* The Python type allhands._core.Window: memory that all ranks of a group share, one region of equal size for each. A
 * tensor in its rank's region needs no staging: the other ranks read and write it in place. */
#ifndef ALLHANDS_PY_WINDOW_H
#define ALLHANDS_PY_WINDOW_H

#include "python/py_segment.h"

/* Set `part->window` if the part is in a window of the group. The caller holds the GIL, under which windows are made
 * and freed, and keeps the tensor, and so the window, until the call ends. */
void ah_find_window(const struct ah_group *group, struct ah_part *part);

#endif
