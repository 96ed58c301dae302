/* The Python type allhands._core.FlightRecorder: the recorder of this process, for writing. */
#include "python/py_flight_recorder.h"

#include <pythread.h>
#include <sys/mman.h>
#include <unistd.h>

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    struct ah_recorder_object *self;
    int fd;

    if (!PyArg_ParseTuple(args, "i:FlightRecorder", &fd))
        return NULL;
    self = (struct ah_recorder_object *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->memory = mmap(NULL, ah_flight_recorder_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->memory == MAP_FAILED) {
        self->memory = NULL;
        Py_DECREF((PyObject *)self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    ah_flight_recorder_format(&self->recorder, self->memory, getpid());
    self->main_thread = PyThread_get_thread_ident();
    return (PyObject *)self;
}

static void unmake(struct ah_recorder_object *self)
{
    if (self->memory)
        munmap(self->memory, ah_flight_recorder_bytes());
    ah_object_free(self);
}

/* Record the shape, a tuple of ints, as far as there is room. */
static int set_shape(struct ah_entry *entry, PyObject *shape)
{
    Py_ssize_t dims = PyTuple_Size(shape);

    entry->dims = dims < 0 ? 0 : (uint32_t)dims;
    for (Py_ssize_t dim = 0; dim < dims && dim < AH_ENTRY_DIMS; dim++)
        entry->shape[dim] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, dim));
    return PyErr_Occurred() ? -1 : 0;
}

/* (operation, group, dtype, reduction, shape, bytes, root, site) -> number of the entry, which is in state WAITING. */
static PyObject *begin(struct ah_recorder_object *self, PyObject *args)
{
    const char *operation, *group, *dtype, *reduction, *site;
    unsigned long long bytes;
    struct ah_entry *entry;
    PyObject *shape;
    int root;

    if (!PyArg_ParseTuple(args, "ssssO!Kis:begin", &operation, &group, &dtype, &reduction, &PyTuple_Type, &shape,
                          &bytes, &root, &site))
        return NULL;
    entry = ah_entry_begin(&self->recorder);
    ah_entry_text(entry->operation, sizeof entry->operation, operation);
    ah_entry_text(entry->group, sizeof entry->group, group);
    ah_entry_text(entry->dtype, sizeof entry->dtype, dtype);
    ah_entry_text(entry->reduction, sizeof entry->reduction, reduction);
    ah_entry_text(entry->site, sizeof entry->site, site);
    entry->bytes = bytes;
    entry->root = root;
    entry->sequence = 0;
    entry->main_thread = 0;
    if (set_shape(entry, shape) != 0) {
        ah_entry_set_state(entry, AH_ENTRY_FAILED);
        return NULL;
    }
    ah_entry_set_state(entry, AH_ENTRY_WAITING);
    return PyLong_FromUnsignedLongLong(entry->number);
}

static PyObject *run(struct ah_recorder_object *self, PyObject *args)
{
    unsigned long long number, sequence;
    struct ah_entry *entry;

    if (!PyArg_ParseTuple(args, "KK:run", &number, &sequence))
        return NULL;
    entry = ah_entry_find(&self->recorder, number);
    if (entry) {
        atomic_fetch_add(&entry->stamp, 1);
        entry->sequence = sequence;
        entry->main_thread = PyThread_get_thread_ident() == self->main_thread;
        ah_entry_set_state(entry, AH_ENTRY_RUNNING);
    }
    Py_RETURN_NONE;
}

static PyObject *end(struct ah_recorder_object *self, PyObject *args)
{
    unsigned long long number;
    struct ah_entry *entry;
    int well;

    if (!PyArg_ParseTuple(args, "Kp:end", &number, &well))
        return NULL;
    entry = ah_entry_find(&self->recorder, number);
    if (entry)
        ah_entry_set_state(entry, well ? AH_ENTRY_DONE : AH_ENTRY_FAILED);
    Py_RETURN_NONE;
}

static PyObject *set_rank(struct ah_recorder_object *self, PyObject *args)
{
    int rank, world_size;

    if (!PyArg_ParseTuple(args, "ii:set_rank", &rank, &world_size))
        return NULL;
    self->recorder.header->rank = rank;
    self->recorder.header->world_size = world_size;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    AH_METHOD(begin, METH_VARARGS,
              "begin(operation, group, dtype, reduction, shape, bytes, root, site) -> number of a waiting entry"),
    AH_METHOD(run, METH_VARARGS, "run(number, sequence): the call runs now; its number in the group"),
    AH_METHOD(end, METH_VARARGS, "end(number, well): the call has ended"),
    AH_METHOD(set_rank, METH_VARARGS, "set_rank(rank, world_size): the rank whose recorder it is"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "FlightRecorder(fd): the recorder of this process, in a file of flight_recorder_bytes() zeros."},
    {0, NULL},
};

PyType_Spec ah_recorder_spec = {
    .name = "allhands._core.FlightRecorder",
    .basicsize = sizeof(struct ah_recorder_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

struct ah_recorder_object *ah_as_recorder(PyObject *object)
{
    return ah_object_made_by(object, make);
}
