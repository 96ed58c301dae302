/* The Python type allhands._core.Segment: takes arguments apart, lets go of the interpreter, calls an operation. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "collective.h"
#include "reduce.h"
#include "wait.h"

struct segment {
    PyObject_HEAD
    void *memory;
    size_t bytes;
    struct ah_group group;
    PyThreadState *thread; /* of the call that runs */
    int pidfds[];
};

/* Let the handlers of signals run: Ctrl-C must end a call that waits for someone who does not come. */
static int pulse(void *context)
{
    struct segment *self = context;
    int raised;

    PyEval_RestoreThread(self->thread);
    raised = PyErr_CheckSignals();
    self->thread = PyEval_SaveThread();
    return raised;
}

/* The code of a call as a number; nothing where a handler raised. */
static PyObject *ended(int code)
{
    return code == AH_INTERRUPTED ? NULL : PyLong_FromLong(code);
}

static int as_part(PyObject *address, PyObject *bytes, struct ah_part *part)
{
    void *data = PyLong_AsVoidPtr(address);

    /* A tensor without elements may have no address; arithmetic on none is not defined. */
    part->data = data ? data : (unsigned char *)"";
    part->bytes = PyLong_AsSize_t(bytes);
    return PyErr_Occurred() ? -1 : 0;
}

/* Parts come as a tuple: address, bytes, address, bytes … The caller frees them. None gives NULL. */
static int as_parts(const struct segment *self, PyObject *given, struct ah_part **parts)
{
    uint32_t ranks = self->group.ranks;

    *parts = NULL;
    if (given == Py_None)
        return 0;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != (Py_ssize_t)ranks * 2) {
        PyErr_SetString(PyExc_ValueError, "a part for each rank: (address, bytes) * ranks");
        return -1;
    }
    *parts = calloc(ranks, sizeof **parts);
    if (!*parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (as_part(PyTuple_GetItem(given, 2 * rank), PyTuple_GetItem(given, 2 * rank + 1), &(*parts)[rank]) != 0) {
            free(*parts);
            *parts = NULL; /* the caller frees what it has */
            return -1;
        }
    }
    return 0;
}

static int as_number(PyObject *given, uint32_t *number)
{
    unsigned long value = PyLong_AsUnsignedLong(given);

    *number = (uint32_t)value;
    return PyErr_Occurred() ? -1 : 0;
}

static int as_time(PyObject *given, int64_t *nanoseconds)
{
    *nanoseconds = PyLong_AsLongLong(given);
    return PyErr_Occurred() ? -1 : 0;
}

static int count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return -1;
}

/* Run `call` without the interpreter's lock and return its code. */
#define RUN(code, call)                       \
    do {                                      \
        self->thread = PyEval_SaveThread();   \
        (code) = (call);                      \
        PyEval_RestoreThread(self->thread);   \
    } while (0)

static PyObject *barrier(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    int64_t limit;
    int code;

    if (count(n, 1) != 0 || as_time(args[0], &limit) != 0)
        return NULL;
    RUN(code, ah_barrier(&self->group, limit));
    return ended(code);
}

static PyObject *all_reduce(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part data;
    uint32_t dtype, reduction;
    int64_t limit;
    int code;

    if (count(n, 5) != 0 || as_part(args[0], args[1], &data) != 0 || as_number(args[2], &dtype) != 0 ||
        as_number(args[3], &reduction) != 0 || as_time(args[4], &limit) != 0)
        return NULL;
    RUN(code, ah_all_reduce(&self->group, data, dtype, reduction, limit));
    return ended(code);
}

static PyObject *reduce(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part data;
    uint32_t dtype, reduction, root;
    int64_t limit;
    int code;

    if (count(n, 6) != 0 || as_part(args[0], args[1], &data) != 0 || as_number(args[2], &dtype) != 0 ||
        as_number(args[3], &reduction) != 0 || as_number(args[4], &root) != 0 || as_time(args[5], &limit) != 0)
        return NULL;
    RUN(code, ah_reduce_to(&self->group, data, dtype, reduction, root, limit));
    return ended(code);
}

static PyObject *broadcast(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part data;
    uint32_t dtype, root;
    int64_t limit;
    int code;

    if (count(n, 5) != 0 || as_part(args[0], args[1], &data) != 0 || as_number(args[2], &dtype) != 0 ||
        as_number(args[3], &root) != 0 || as_time(args[4], &limit) != 0)
        return NULL;
    RUN(code, ah_broadcast(&self->group, data, dtype, root, limit));
    return ended(code);
}

static PyObject *all_gather(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part in, *out;
    uint32_t dtype;
    int64_t limit;
    int code;

    if (count(n, 5) != 0 || as_part(args[0], args[1], &in) != 0 || as_number(args[3], &dtype) != 0 ||
        as_time(args[4], &limit) != 0 || as_parts(self, args[2], &out) != 0)
        return NULL;
    RUN(code, ah_all_gather(&self->group, in, out, dtype, limit));
    free(out);
    return ended(code);
}

static PyObject *gather(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part in, *out;
    uint32_t dtype, root;
    int64_t limit;
    int code;

    if (count(n, 6) != 0 || as_part(args[0], args[1], &in) != 0 || as_number(args[3], &dtype) != 0 ||
        as_number(args[4], &root) != 0 || as_time(args[5], &limit) != 0 || as_parts(self, args[2], &out) != 0)
        return NULL;
    RUN(code, ah_gather(&self->group, in, out, dtype, root, limit));
    free(out);
    return ended(code);
}

static PyObject *scatter(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part *in, out;
    uint32_t dtype, root;
    int64_t limit;
    int code;

    if (count(n, 6) != 0 || as_part(args[1], args[2], &out) != 0 || as_number(args[3], &dtype) != 0 ||
        as_number(args[4], &root) != 0 || as_time(args[5], &limit) != 0 || as_parts(self, args[0], &in) != 0)
        return NULL;
    RUN(code, ah_scatter(&self->group, in, out, dtype, root, limit));
    free(in);
    return ended(code);
}

static PyObject *reduce_scatter(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part *in, out;
    uint32_t dtype, reduction;
    int64_t limit;
    int code;

    if (count(n, 6) != 0 || as_part(args[1], args[2], &out) != 0 || as_number(args[3], &dtype) != 0 ||
        as_number(args[4], &reduction) != 0 || as_time(args[5], &limit) != 0 || as_parts(self, args[0], &in) != 0)
        return NULL;
    RUN(code, ah_reduce_scatter(&self->group, in, out, dtype, reduction, limit));
    free(in);
    return ended(code);
}

static PyObject *all_to_all(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_part *in = NULL, *out = NULL;
    uint32_t dtype;
    int64_t limit;
    int code;

    if (count(n, 4) != 0 || as_number(args[2], &dtype) != 0 || as_time(args[3], &limit) != 0)
        return NULL;
    if (as_parts(self, args[0], &in) != 0 || as_parts(self, args[1], &out) != 0) {
        free(in);
        return NULL;
    }
    RUN(code, ah_all_to_all(&self->group, in, out, dtype, limit));
    free(in);
    free(out);
    return ended(code);
}

static PyObject *end(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t rank;

    if (count(n, 1) != 0 || as_number(args[0], &rank) != 0)
        return NULL;
    ah_end(&self->group, AH_ABORTED, rank);
    Py_RETURN_NONE;
}

static PyObject *depart(struct segment *self, PyObject *Py_UNUSED(none))
{
    ah_depart(&self->group);
    Py_RETURN_NONE;
}

static PyObject *patience(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    if (count(n, 2) != 0 || as_number(args[0], &self->group.spins) != 0 ||
        as_number(args[1], &self->group.yields) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *culprit(struct segment *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLong(self->group.culprit);
}

/* (sequence, kind, reduction, dtype, bytes, root) of the last call of a rank. */
static PyObject *call(struct segment *self, PyObject *const *args, Py_ssize_t n)
{
    const struct ah_member *member;
    struct ah_call theirs;
    uint32_t rank;
    int came;

    if (count(n, 1) != 0 || as_number(args[0], &rank) != 0)
        return NULL;
    if (rank >= self->group.ranks) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return NULL;
    }
    member = &self->group.members[rank];
    /* Another's call is looked at once it is whole, and we ourselves came if we got as far as arriving. */
    if (rank == self->group.rank)
        came = (int32_t)(atomic_load(&member->arrived) - (self->group.ticket + 1)) >= 0;
    else
        came = atomic_load(&member->noted) > self->group.call.sequence;
    theirs = member->calls[self->group.call.sequence % AH_CALLS];
    if (!came)
        theirs.sequence = UINT64_MAX;
    if (theirs.count == 0) /* sizes may differ between ranks: its own largest */
        theirs.count = atomic_load(&member->largest[self->group.call.sequence % AH_CALLS]);
    return Py_BuildValue("(KkkkKi)", (unsigned long long)theirs.sequence, (unsigned long)theirs.kind,
                         (unsigned long)theirs.reduce, (unsigned long)theirs.dtype, (unsigned long long)theirs.count,
                         (int)theirs.root);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *pidfds, *made;
    struct segment *self;
    const char *nonce;
    Py_ssize_t nonce_bytes, bytes;
    unsigned int rank;
    int fd;

    if (keywords && PyDict_Size(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "Segment takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "inIy#O!:Segment", &fd, &bytes, &rank, &nonce, &nonce_bytes, &PyTuple_Type, &pidfds))
        return NULL;
    if (nonce_bytes != 16 || bytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "a nonce of 16 bytes and a size above 0");
        return NULL;
    }
    made = allocate(type, PyTuple_Size(pidfds));
    if (!made)
        return NULL;
    self = (struct segment *)made;
    for (Py_ssize_t index = 0; index < PyTuple_Size(pidfds); index++)
        self->pidfds[index] = (int)PyLong_AsLong(PyTuple_GetItem(pidfds, index));
    self->bytes = (size_t)bytes;
    self->memory = PyErr_Occurred() ? MAP_FAILED : mmap(NULL, self->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->memory == MAP_FAILED) {
        self->memory = NULL;
        Py_DECREF(made);
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    }
    if (ah_segment_open(&self->group, self->memory, self->bytes, rank, (const unsigned char *)nonce, self->pidfds) !=
            AH_OK ||
        PyTuple_Size(pidfds) != (Py_ssize_t)self->group.ranks) {
        Py_DECREF(made);
        PyErr_SetString(PyExc_ValueError, "this is not the segment that was announced");
        return NULL;
    }
    self->group.pulse = pulse;
    self->group.context = self;
    return made;
}

static void unmake(PyObject *object)
{
    struct segment *self = (struct segment *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->memory)
        munmap(self->memory, self->bytes);
    release(object);
    Py_DECREF(type);
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))(name), METH_FASTCALL, text}

static PyMethodDef METHODS[] = {
    METHOD(barrier, "barrier(timeout_ns) -> code"),
    METHOD(all_reduce, "all_reduce(address, bytes, dtype, reduction, timeout_ns) -> code"),
    METHOD(reduce, "reduce(address, bytes, dtype, reduction, root, timeout_ns) -> code"),
    METHOD(broadcast, "broadcast(address, bytes, dtype, root, timeout_ns) -> code"),
    METHOD(all_gather, "all_gather(address, bytes, out, dtype, timeout_ns) -> code"),
    METHOD(gather, "gather(address, bytes, out, dtype, root, timeout_ns) -> code"),
    METHOD(scatter, "scatter(in, address, bytes, dtype, root, timeout_ns) -> code"),
    METHOD(reduce_scatter, "reduce_scatter(in, address, bytes, dtype, reduction, timeout_ns) -> code"),
    METHOD(all_to_all, "all_to_all(in, out, dtype, timeout_ns) -> code"),
    METHOD(end, "end(rank): the group is over because of rank"),
    METHOD(patience, "patience(spins, yields): how often to look before sleeping"),
    METHOD(call, "call(rank) -> (sequence, kind, reduction, dtype, bytes, root)"),
    {"depart", (PyCFunction)(void (*)(void))depart, METH_NOARGS, "depart(): this rank makes no further call"},
    {"culprit", (PyCFunction)(void (*)(void))culprit, METH_NOARGS, "culprit() -> rank of the last bad end"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Segment(fd, bytes, rank, nonce, pidfds): one rank's view of a group's shared memory."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Segment",
    .basicsize = sizeof(struct segment),
    .itemsize = sizeof(int),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_segment_type(void)
{
    return PyType_FromSpec(&SPEC);
}

PyObject *ah_py_segment_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks;
    Py_ssize_t slot_bytes;

    if (!PyArg_ParseTuple(args, "In:segment_bytes", &ranks, &slot_bytes))
        return NULL;
    return PyLong_FromSize_t(ah_segment_bytes(ranks, (size_t)slot_bytes));
}

PyObject *ah_py_reducible(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int dtype, reduction;

    if (!PyArg_ParseTuple(args, "II:reducible", &dtype, &reduction))
        return NULL;
    return PyBool_FromLong(ah_reducible(dtype, reduction));
}

PyObject *ah_py_segment_format(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks;
    Py_ssize_t slot_bytes, nonce_bytes;
    const char *nonce;
    size_t bytes;
    void *memory;
    int fd, code;

    if (!PyArg_ParseTuple(args, "iIny#:segment_format", &fd, &ranks, &slot_bytes, &nonce, &nonce_bytes))
        return NULL;
    if (nonce_bytes != 16 || ranks == 0) {
        PyErr_SetString(PyExc_ValueError, "a nonce of 16 bytes and at least one rank");
        return NULL;
    }
    bytes = ah_segment_bytes(ranks, (size_t)slot_bytes);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    ah_segment_format(memory, ranks, (size_t)slot_bytes, (const unsigned char *)nonce);
    /* Give every page now: running out of memory is found out here, not by a signal in the middle of a copy. */
    Py_BEGIN_ALLOW_THREADS
    code = madvise(memory, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    Py_END_ALLOW_THREADS
    munmap(memory, bytes);
    if (code != 0 && code != EINVAL) { /* EINVAL: a kernel before 5.14 gives pages when they are touched */
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}
