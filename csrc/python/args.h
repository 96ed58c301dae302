/* What Python gives as numbers, taken apart. Each function returns 0, or -1 with an exception set. */
#ifndef ALLHANDS_ARGS_H
#define ALLHANDS_ARGS_H

#include "python/object.h"

#include "collectives/collective.h"

int ah_check_argument_count(Py_ssize_t given, Py_ssize_t wanted);

int ah_as_uint32(PyObject *given, uint32_t *number);

int ah_as_int64(PyObject *given, int64_t *nanoseconds);

int ah_as_part(PyObject *address, PyObject *bytes, struct ah_part *part);

/* Parts come as a tuple: address, bytes, address, bytes … The caller frees them. None gives NULL. */
int ah_as_parts(uint32_t ranks, PyObject *given, struct ah_part **parts);

/* Tensors that are taken as one, in the same form. The caller frees the tensors. */
int ah_as_tensor_list(PyObject *given, struct ah_tensor_list *tensors);

#endif
