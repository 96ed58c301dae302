/* Parsing of arguments. Each function returns 0, or -1 with an exception set. */
#ifndef ALLHANDS_ARGS_H
#define ALLHANDS_ARGS_H

#include "python/object.h"

#include "collectives/collective.h"

int ah_check_argument_count(Py_ssize_t given, Py_ssize_t wanted);

int ah_as_uint32(PyObject *given, uint32_t *number);

int ah_as_int64(PyObject *given, int64_t *nanoseconds);

int ah_as_part(PyObject *address, PyObject *bytes, struct ah_part *part);

/* Parse a tuple with the address and bytes of each rank's part; None gives NULL. The caller frees the parts. */
int ah_as_parts(uint32_t ranks, PyObject *given, struct ah_part **parts);

/* Parse a tensor list in the same form. The caller frees it. */
int ah_as_tensor_list(PyObject *given, struct ah_tensor_list *tensors);

#endif
