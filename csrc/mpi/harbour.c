/* The Python type allhands._core.Ferry: lets go of the interpreter, makes a voyage. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "mpi/harbour.h"

#include <stddef.h>
#include <structmember.h>

#include "python/args.h"
#include "mpi/port.h"
#include "mpi/voyage.h"

static int voyage(struct ah_ferry *ferry, const struct ah_operation *move)
{
    switch (move->kind) {
    case AH_BARRIER:
        return ah_voyage_barrier(ferry, move->limit_ns);
    case AH_ALL_REDUCE:
        return ah_voyage_all_reduce(ferry, move->data, move->dtype, move->reduction, move->limit_ns);
    case AH_REDUCE:
        return ah_voyage_reduce_to(ferry, move->data, move->dtype, move->reduction, move->root, move->limit_ns);
    case AH_BROADCAST:
        return ah_voyage_broadcast(ferry, move->data, move->dtype, move->root, move->limit_ns);
    case AH_ALL_GATHER:
        return ah_voyage_all_gather(ferry, move->data, move->out, move->dtype, move->limit_ns);
    case AH_GATHER:
        return ah_voyage_gather(ferry, move->data, move->out, move->dtype, move->root, move->limit_ns);
    case AH_SCATTER:
        return ah_voyage_scatter(ferry, move->in, move->data, move->dtype, move->root, move->limit_ns);
    case AH_REDUCE_SCATTER:
        return ah_voyage_reduce_scatter(ferry, move->in, move->data, move->dtype, move->reduction, move->limit_ns);
    case AH_ALL_TO_ALL:
        return ah_voyage_all_to_all(ferry, move->in, move->out, move->dtype, move->limit_ns);
    default:
        return AH_INVALID;
    }
}

/* A ferry's move, see struct ah_call_lock. */
static int move(void *mover, struct ah_operation *move)
{
    struct ah_harbour *self = mover;
    int code;

    if (move->entry && self->ferry.sheets)
        ah_record_quote(&self->ferry.sheets[self->ferry.rank].record, move->entry);
    AH_WITHOUT_GIL(self, code, voyage(&self->ferry, move));
    return code;
}

static PyObject *agree(struct ah_harbour *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_trip trip = {0};
    int64_t limit;
    int code;

    if (ah_check_argument_count(n, 7) != 0 || ah_as_uint32(args[0], &trip.kind) != 0 || ah_as_uint32(args[1], &trip.reduction) != 0 ||
        ah_as_uint32(args[2], &trip.dtype) != 0 || ah_as_uint32(args[5], &trip.flags) != 0 ||
        ah_as_int64(args[6], &limit) != 0)
        return NULL;
    trip.bytes = PyLong_AsSize_t(args[3]);
    trip.root = (int32_t)PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    AH_WITHOUT_GIL(self, code, ah_voyage_agree(&self->ferry, &trip, limit));
    return ah_outcome_to_python(code);
}

/* About the calls ----------------------------------------------------------------------------------------- */

static PyObject *say(struct ah_harbour *self, PyObject *const *args, Py_ssize_t n)
{
    const char *words[3];

    if (ah_check_argument_count(n, 3) != 0)
        return NULL;
    for (int word = 0; word < 3; word++) {
        words[word] = PyUnicode_AsUTF8AndSize(args[word], NULL);
        if (!words[word])
            return NULL;
    }
    if (self->ferry.sheets)
        ah_record_say(&self->ferry.sheets[self->ferry.rank].record, words[0], words[1], words[2]);
    Py_RETURN_NONE;
}

static PyObject *records(struct ah_harbour *self, PyObject *Py_UNUSED(none))
{
    uint32_t ranks = self->ferry.sheets ? self->ferry.ranks : 0;
    PyObject *list = PyList_New(ranks);

    for (uint32_t rank = 0; list && rank < ranks; rank++) {
        PyObject *record = PyBytes_FromStringAndSize((const char *)&self->ferry.sheets[rank].record,
                                                     sizeof self->ferry.sheets[rank].record);

        if (!record || PyList_SetItem(list, rank, record) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *tables(struct ah_harbour *self, PyObject *Py_UNUSED(none))
{
    Py_ssize_t numbers = (Py_ssize_t)self->ferry.ranks * 2 * self->ferry.ranks;
    PyObject *list = PyList_New(self->ferry.tables ? numbers : 0);

    for (Py_ssize_t index = 0; list && self->ferry.tables && index < numbers; index++) {
        PyObject *number = PyLong_FromLongLong(self->ferry.tables[index]);

        if (!number || PyList_SetItem(list, index, number) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *problem(struct ah_harbour *self, PyObject *Py_UNUSED(none))
{
    char words[AH_MPI_WORDS] = "";

    if (self->ferry.error != 0) {
        Py_BEGIN_ALLOW_THREADS
        self->ferry.mpi->say(self->ferry.mpi, self->ferry.error, words);
        Py_END_ALLOW_THREADS
    }
    words[sizeof words - 1] = '\0';
    return PyUnicode_DecodeLocale(words, "surrogateescape");
}

static PyObject *end(struct ah_harbour *self, PyObject *Py_UNUSED(none))
{
    atomic_store_explicit(&self->ferry.over, 1, memory_order_release);
    Py_RETURN_NONE;
}

static PyObject *close_it(struct ah_harbour *self, PyObject *Py_UNUSED(none))
{
    self->lock.fast_path_closed = 1;
    Py_BEGIN_ALLOW_THREADS
    ah_ferry_close(&self->ferry);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The type ------------------------------------------------------------------------------------------------ */

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    unsigned int rank, ranks, spins, burst;
    unsigned long long comm, byte;
    int wall;
    PyObject *port, *made;
    struct ah_harbour *self;
    struct ah_ferry *ferry;
    int code;

    if (!PyArg_ParseTuple(args, "OKKIIIIi:Ferry", &port, &comm, &byte, &rank, &ranks, &spins, &burst, &wall))
        return NULL;
    if (!ah_as_mpi(port) || rank >= ranks || burst == 0) {
        PyErr_SetString(PyExc_ValueError, "Ferry(port, comm, byte, rank, ranks, spins, burst, wall)");
        return NULL;
    }
    made = allocate(type, 0);
    if (!made)
        return NULL;
    self = (struct ah_harbour *)made;
    ferry = &self->ferry;
    *ferry = (struct ah_ferry){.rank = rank, .ranks = ranks, .spins = spins, .burst = burst};
    ferry->mpi = ah_as_mpi(port);
    ferry->comm = (struct ah_mpi_comm){.comm = (uintptr_t)comm, .byte = (uintptr_t)byte};
    ferry->check_interrupt = ah_call_lock_check_signals;
    ferry->context = self;
    self->port = Py_NewRef(port);
    if (wall >= 0 && ah_wall_open(&ferry->wall, wall, ranks) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(made);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    code = ah_ferry_open(ferry);
    Py_END_ALLOW_THREADS
    if (code != 0) {
        Py_DECREF(made);
        PyErr_SetString(PyExc_RuntimeError, "MPI prepares no messages for a group, or there is no memory");
        return NULL;
    }
    ah_call_lock_init(&self->lock, rank, ranks, &ferry->sequence, move);
    return made;
}

/* What MPI still knows of stays: it may be over by now, or write there yet. `close` is what frees it. */
static void unmake(PyObject *object)
{
    struct ah_harbour *self = (struct ah_harbour *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    ah_call_lock_clear(&self->lock);
    ah_wall_close(&self->ferry.wall);
    Py_XDECREF(self->port);
    release(object);
    Py_DECREF(type);
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))(name), METH_FASTCALL, text}
#define PLAIN(name, function, text) {name, (PyCFunction)(void (*)(void))(function), METH_NOARGS, text}

static PyMethodDef METHODS[] = {
    AH_OPERATION_METHOD(barrier, "barrier(timeout_ns) -> code"),
    METHOD(agree, "agree(kind, reduction, dtype, bytes, root, flags, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_reduce, "all_reduce(address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_OPERATION_METHOD(reduce, "reduce(address, bytes, dtype, reduction, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(broadcast, "broadcast(address, bytes, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_gather, "all_gather(address, bytes, out, dtype, timeout_ns) -> code"),
    AH_OPERATION_METHOD(gather, "gather(address, bytes, out, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(scatter, "scatter(given, address, bytes, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(reduce_scatter, "reduce_scatter(given, address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_to_all, "all_to_all(given, out, dtype, timeout_ns) -> code"),
    METHOD(say, "say(shape, site, refused): the words of the next call"),
    PLAIN("records", records, "records() -> everyone's records of the last call, as bytes"),
    PLAIN("tables", tables, "tables() -> what each rank gives to and takes from each in the last call; [] if all alike"),
    PLAIN("problem", problem, "problem() -> what MPI said of the last call, '' for nothing"),
    PLAIN("sequence", ah_call_lock_sequence, "sequence() -> number of the last call"),
    PLAIN("end", end, "end(): the group is over: whoever waits stops"),
    PLAIN("close", close_it, "close(): make no further call, and let go of what MPI has for this group"),
    PLAIN("__enter__", ah_call_lock_enter, "Wait for our turn."),
    {"__exit__", (PyCFunction)(void (*)(void))ah_call_lock_exit, METH_FASTCALL, "Let the next one have it."},
    {"configure_fast_path", (PyCFunction)(void (*)(void))ah_call_lock_configure, METH_FASTCALL,
     "configure_fast_path(limit_ns, name, ranks, board): what the short way has to know of the group"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"queued", T_UINT, offsetof(struct ah_harbour, lock.queued), 0, "calls that wait for their turn"},
    {"fast_path_closed", T_INT, offsetof(struct ah_harbour, lock.fast_path_closed), 0, "not 0: no more calls of the short way"},
    {"under_way", T_INT, offsetof(struct ah_harbour, ferry.under_way), 0, "not 0: a call is not over, or ended badly"},
    {"left", T_INT, offsetof(struct ah_harbour, ferry.left), READONLY, "not 0: a call was left in the middle"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_members, MEMBERS},
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Ferry(port, comm, byte, rank, ranks, spins, burst, wall): one rank's end of a group over MPI."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Ferry",
    .basicsize = sizeof(struct ah_harbour),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_harbour_type(void)
{
    return PyType_FromSpec(&SPEC);
}

struct ah_harbour *ah_as_harbour(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? (struct ah_harbour *)object : NULL;
}
