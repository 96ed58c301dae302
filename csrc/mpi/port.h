/* The Python type of the MPI library. */
#ifndef ALLHANDS_PORT_H
#define ALLHANDS_PORT_H

#include <Python.h>

#include "mpi/mpi.h"

/* Returns a new reference; NULL with an exception set. */
PyObject *ah_port_type(void);

/* The library of the object if it is one, else NULL (and no exception). It lives as long as the object. */
struct ah_mpi *ah_as_mpi(PyObject *object);

#endif
