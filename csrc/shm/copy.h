/* Copying between a tensor and a slot. */
#ifndef ALLHANDS_COPY_H
#define ALLHANDS_COPY_H

#include <stddef.h>

/* Copy; with `bypass` past the caches (non-temporal stores), for targets that are not read again soon. */
void ah_copy(void *to, const void *from, size_t bytes, int bypass);

#endif
