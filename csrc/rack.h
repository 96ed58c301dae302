/* Gradients on a shelf: whose memory they are, and which of them may lie there. The Python type allhands._core.Shelf. */
#ifndef ALLHANDS_RACK_H
#define ALLHANDS_RACK_H

#include <Python.h>

#include "way.h"

struct ah_rack;

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_rack_type(void);

/* The object if it is a shelf, else NULL (and no exception). */
struct ah_rack *ah_as_rack(PyObject *object);

/* Whether item `index` may be put there now. */
int ah_rack_takes(const struct ah_rack *rack, size_t index);

/* Put the tensor `gradient`, which is `plain`, there as item `index`, unless it shares memory with one that is there. Lets go of the
 * interpreter meanwhile where it is large. */
void ah_rack_put(struct ah_rack *rack, size_t index, PyObject *gradient, const struct ah_plain *plain);

#endif
