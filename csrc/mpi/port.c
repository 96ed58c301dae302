/* The Python type allhands._core.Port: the MPI library of this process, and the lock of its calls. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "mpi/port.h"

#include <string.h>

struct port {
    PyObject_HEAD
    struct ah_mpi mpi;
};

/* Whoever calls MPI by other means holds this meanwhile; it is open to all where the library takes many at a time. */
static PyObject *enter(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ah_mpi *mpi = &((struct port *)object)->mpi;

    if (mpi->alone) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&mpi->lock);
        Py_END_ALLOW_THREADS
    }
    return Py_NewRef(object);
}

static PyObject *leave(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    struct ah_mpi *mpi = &((struct port *)object)->mpi;

    if (mpi->alone)
        pthread_mutex_unlock(&mpi->lock);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    uintptr_t addresses[AH_MPI_CALLS];
    PyObject *given, *made;
    struct ah_mpi *mpi;
    const char *family;
    unsigned long long none;
    int alone;

    if (!PyArg_ParseTuple(args, "sO!Kp:Port", &family, &PyTuple_Type, &given, &none, &alone))
        return NULL;
    if (PyTuple_Size(given) != AH_MPI_CALLS || (strcmp(family, "openmpi") != 0 && strcmp(family, "mpich") != 0)) {
        PyErr_SetString(PyExc_ValueError, "openmpi or mpich, and an address for each function");
        return NULL;
    }
    for (Py_ssize_t index = 0; index < AH_MPI_CALLS; index++)
        addresses[index] = (uintptr_t)PyLong_AsVoidPtr(PyTuple_GetItem(given, index));
    if (PyErr_Occurred())
        return NULL;
    made = allocate(type, 0);
    if (!made)
        return NULL;
    mpi = &((struct port *)made)->mpi;
    if (strcmp(family, "openmpi") == 0)
        ah_openmpi(mpi, addresses);
    else
        ah_mpich(mpi, addresses);
    mpi->none = (uintptr_t)none;
    mpi->alone = alone;
    pthread_mutex_init(&mpi->lock, NULL);
    return made;
}

static void unmake(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    pthread_mutex_destroy(&((struct port *)object)->mpi.lock);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"__enter__", (PyCFunction)(void (*)(void))enter, METH_NOARGS, "Wait until MPI may be called."},
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, "Let the next one call it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Port(family, addresses, none, alone): the MPI library of this process, by its functions' addresses."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Port",
    .basicsize = sizeof(struct port),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_port_type(void)
{
    return PyType_FromSpec(&SPEC);
}

struct ah_mpi *ah_as_mpi(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? &((struct port *)object)->mpi : NULL;
}
