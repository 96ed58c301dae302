/* The Python type allhands._core.Board: the board of this process, for those who write on it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/py_flight_recorder.h"

#include <pythread.h>
#include <sys/mman.h>
#include <unistd.h>

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct ah_notice *self;
    PyObject *made;
    int fd;

    if (!PyArg_ParseTuple(args, "i:Board", &fd))
        return NULL;
    made = allocate(type, 0);
    if (!made)
        return NULL;
    self = (struct ah_notice *)made;
    self->memory = mmap(NULL, ah_board_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->memory == MAP_FAILED) {
        self->memory = NULL;
        Py_DECREF(made);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    ah_board_format(&self->board, self->memory, getpid());
    self->main = PyThread_get_thread_ident();
    return made;
}

static void unmake(PyObject *object)
{
    struct ah_notice *self = (struct ah_notice *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->memory)
        munmap(self->memory, ah_board_bytes());
    release(object);
    Py_DECREF(type);
}

int ah_note_shape(struct ah_note *note, PyObject *shape)
{
    Py_ssize_t dims = PyTuple_Size(shape);

    note->dims = dims < 0 ? 0 : (uint32_t)dims;
    for (Py_ssize_t dim = 0; dim < dims && dim < AH_BOARD_DIMS; dim++)
        note->shape[dim] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, dim));
    return PyErr_Occurred() ? -1 : 0;
}

/* (operation, group, dtype, reduction, shape, bytes, root, site) -> number of the note, which waits. */
static PyObject *begin(PyObject *object, PyObject *args)
{
    struct ah_notice *self = (struct ah_notice *)object;
    const char *operation, *group, *dtype, *reduction, *site;
    unsigned long long bytes;
    struct ah_note *note;
    PyObject *shape;
    int root;

    if (!PyArg_ParseTuple(args, "ssssO!Kis:begin", &operation, &group, &dtype, &reduction, &PyTuple_Type, &shape,
                          &bytes, &root, &site))
        return NULL;
    note = ah_note_begin(&self->board);
    ah_note_text(note->operation, sizeof note->operation, operation);
    ah_note_text(note->group, sizeof note->group, group);
    ah_note_text(note->dtype, sizeof note->dtype, dtype);
    ah_note_text(note->reduction, sizeof note->reduction, reduction);
    ah_note_text(note->site, sizeof note->site, site);
    note->bytes = bytes;
    note->root = root;
    note->sequence = 0;
    note->main = 0;
    if (ah_note_shape(note, shape) != 0) {
        ah_note_set(note, AH_NOTE_FAILED);
        return NULL;
    }
    ah_note_set(note, AH_NOTE_WAITING);
    return PyLong_FromUnsignedLongLong(note->number);
}

static PyObject *run(PyObject *object, PyObject *args)
{
    struct ah_notice *self = (struct ah_notice *)object;
    unsigned long long number, sequence;
    struct ah_note *note;

    if (!PyArg_ParseTuple(args, "KK:run", &number, &sequence))
        return NULL;
    note = ah_note_find(&self->board, number);
    if (note) {
        atomic_fetch_add(&note->stamp, 1);
        note->sequence = sequence;
        note->main = PyThread_get_thread_ident() == self->main;
        ah_note_set(note, AH_NOTE_RUNNING);
    }
    Py_RETURN_NONE;
}

static PyObject *end(PyObject *object, PyObject *args)
{
    struct ah_notice *self = (struct ah_notice *)object;
    unsigned long long number;
    struct ah_note *note;
    int well;

    if (!PyArg_ParseTuple(args, "Kp:end", &number, &well))
        return NULL;
    note = ah_note_find(&self->board, number);
    if (note)
        ah_note_set(note, well ? AH_NOTE_DONE : AH_NOTE_FAILED);
    Py_RETURN_NONE;
}

static PyObject *sign(PyObject *object, PyObject *args)
{
    struct ah_notice *self = (struct ah_notice *)object;
    int rank, world_size;

    if (!PyArg_ParseTuple(args, "ii:sign", &rank, &world_size))
        return NULL;
    self->board.head->rank = rank;
    self->board.head->world_size = world_size;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"begin", begin, METH_VARARGS,
     "begin(operation, group, dtype, reduction, shape, bytes, root, site) -> number of a note that waits"},
    {"run", run, METH_VARARGS, "run(number, sequence): it runs now, as that call of its group"},
    {"end", end, METH_VARARGS, "end(number, well): it is done"},
    {"sign", sign, METH_VARARGS, "sign(rank, world_size): whose board it is"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Board(fd): the board of this process, in a file of board_bytes() zeros."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Board",
    .basicsize = sizeof(struct ah_notice),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_notice_type(void)
{
    return PyType_FromSpec(&SPEC);
}

struct ah_notice *ah_as_notice(PyObject *object)
{
    /* The module has no state to find its types in; what makes an object tells what it is. */
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? (struct ah_notice *)object : NULL;
}
