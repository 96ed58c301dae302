#include "python/py_segment.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/mman.h>

#include "python/args.h"
#include "python/py_window.h"
#include "shm/fingerprint.h"
#include "shm/helper_threads.h"
#include "shm/tensor_list.h"

/* A call on the fast path that moves no more than this is over before another thread would have got the GIL. */
#define SHORT_BYTES ((size_t)4 << 10)

/* Release the GIL; `context` is the PyThreadState * to keep. */
static void release_gil(void *context)
{
    *(PyThreadState **)context = PyEval_SaveThread();
}

int ah_check_signals(void *context)
{
    PyThreadState **thread = context;
    int raised;

    PyEval_RestoreThread(*thread);
    raised = PyErr_CheckSignals();
    *thread = PyEval_SaveThread();
    return raised;
}

/* Operations ----------------------------------------------------------------------------------------------- */

static int dispatch(struct ah_group *group, const struct ah_operation *call)
{
    switch (call->kind) {
    case AH_BARRIER:
        return ah_barrier(group, call->limit_ns);
    case AH_ALL_REDUCE:
        if (call->tensors.number)
            return ah_all_reduce_list(group, call->tensors, call->dtype, call->reduction, call->limit_ns);
        return ah_all_reduce(group, call->data, call->dtype, call->reduction, call->limit_ns);
    case AH_REDUCE:
        return ah_reduce_to_root(group, call->data, call->dtype, call->reduction, call->root, call->limit_ns);
    case AH_BROADCAST:
        return ah_broadcast(group, call->data, call->dtype, call->root, call->limit_ns);
    case AH_ALL_GATHER:
        return ah_all_gather(group, call->data, call->out, call->dtype, call->limit_ns);
    case AH_GATHER:
        return ah_gather(group, call->data, call->out, call->dtype, call->root, call->limit_ns);
    case AH_SCATTER:
        return ah_scatter(group, call->in, call->data, call->dtype, call->root, call->limit_ns);
    case AH_REDUCE_SCATTER:
        return ah_reduce_scatter(group, call->in, call->data, call->dtype, call->reduction, call->limit_ns);
    case AH_ALL_TO_ALL:
        return ah_all_to_all(group, call->in, call->out, call->dtype, call->limit_ns);
    default:
        return AH_INVALID;
    }
}

int ah_segment_run(struct ah_segment *self, struct ah_operation *operation)
{
    struct ah_group *group = &self->group;
    int code;

    if (operation->kind == AH_ALL_REDUCE && !operation->tensors.number)
        ah_find_window(group, &operation->data);
    if (operation->entry)
        group->now_ns = operation->entry->started_ns;
    /* A short call releases the GIL only if it has to wait for others. */
    if (operation->entry && operation->entry->bytes <= SHORT_BYTES)
        group->on_long_wait = release_gil;
    else
        release_gil(&self->thread);
    code = dispatch(group, operation);
    if (group->on_long_wait)
        group->on_long_wait = NULL;
    else
        PyEval_RestoreThread(self->thread);
    return code;
}

/* The outcome of a call as a number; NULL where a signal handler raised. */
static PyObject *to_python(int code)
{
    return code == AH_INTERRUPTED ? NULL : PyLong_FromLong(code);
}

/* Parse one argument. Parts for each rank ('i', 'o', 'l') are parsed later; bytes ('b') are parsed with their
 * address. */
static int parse(char what, PyObject *const *arg, struct ah_operation *operation)
{
    switch (what) {
    case 'a':
        return ah_as_part(arg[0], arg[1], &operation->data);
    case 'd':
        return ah_as_uint32(*arg, &operation->dtype);
    case 'x':
        return ah_as_uint32(*arg, &operation->reduction);
    case 'r':
        return ah_as_uint32(*arg, &operation->root);
    case 't':
        return ah_as_int64(*arg, &operation->limit_ns);
    default:
        return 0;
    }
}

/* Perform an operation whose arguments are described by `format`, one letter for each; see `parse`. */
static PyObject *perform(struct ah_segment *self, enum ah_operation_code kind, const char *format,
                         PyObject *const *args, Py_ssize_t n)
{
    const char *in_at = strchr(format, 'i'), *out_at = strchr(format, 'o'), *list_at = strchr(format, 'l');
    struct ah_part *in = NULL, *out = NULL;
    struct ah_operation operation = {.kind = kind};
    PyObject *result = NULL;

    if (ah_check_argument_count(n, (Py_ssize_t)strlen(format)) != 0)
        return NULL;
    for (Py_ssize_t index = 0; index < n; index++) {
        if (parse(format[index], &args[index], &operation) != 0)
            return NULL;
    }
    /* Parts come last, because they have to be freed. */
    if ((!in_at || ah_as_parts(self->group.ranks, args[in_at - format], &in) == 0) &&
        (!out_at || ah_as_parts(self->group.ranks, args[out_at - format], &out) == 0) &&
        (!list_at || ah_as_tensor_list(args[list_at - format], &operation.tensors) == 0)) {
        operation.in = in;
        operation.out = out;
        result = to_python(ah_segment_run(self, &operation));
    }
    free(in);
    free(out);
    ah_tensor_list_free(&operation.tensors);
    return result;
}

#define OPERATION(name, kind, format)                                                            \
    static PyObject *name(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)          \
    {                                                                                            \
        return perform(self, kind, format, args, n);                                             \
    }

OPERATION(barrier, AH_BARRIER, "t")
OPERATION(all_reduce, AH_ALL_REDUCE, "abdxt")
OPERATION(all_reduce_list, AH_ALL_REDUCE, "ldxt")
OPERATION(reduce, AH_REDUCE, "abdxrt")
OPERATION(broadcast, AH_BROADCAST, "abdrt")
OPERATION(all_gather, AH_ALL_GATHER, "abodt")
OPERATION(gather, AH_GATHER, "abodrt")
OPERATION(scatter, AH_SCATTER, "iabdrt")
OPERATION(reduce_scatter, AH_REDUCE_SCATTER, "iabdxt")
OPERATION(all_to_all, AH_ALL_TO_ALL, "iodt")

static PyObject *compare_only(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t kind, reduction, dtype;
    struct ah_call call = {0};
    int64_t limit;
    int code;

    if (ah_check_argument_count(n, 6) != 0 || ah_as_uint32(args[0], &kind) != 0 ||
        ah_as_uint32(args[1], &reduction) != 0 || ah_as_uint32(args[2], &dtype) != 0 ||
        ah_as_int64(args[5], &limit) != 0)
        return NULL;
    call.kind = (uint16_t)kind;
    call.reduce = (uint16_t)reduction;
    call.dtype = (uint16_t)dtype;
    call.count = PyLong_AsUnsignedLongLong(args[3]);
    call.root = (int16_t)PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    release_gil(&self->thread);
    code = ah_compare_only(&self->group, &call, limit);
    PyEval_RestoreThread(self->thread);
    return to_python(code);
}

/* The call lock -------------------------------------------------------------------------------------------- */

/* Wait for the lock, however long the calls before take; each of them has a deadline. */
static PyObject *enter(struct ah_segment *self, PyObject *Py_UNUSED(none))
{
    int taken = ah_call_lock_try(&self->lock);

    while (!taken) {
        Py_BEGIN_ALLOW_THREADS
        taken = ah_call_lock_sleep(&self->lock);
        Py_END_ALLOW_THREADS
        if (!taken && PyErr_CheckSignals() != 0)
            return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

static PyObject *release(struct ah_segment *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    ah_call_lock_release(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *configure_fast_path(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    const char *name;

    if (ah_check_argument_count(n, 4) != 0 || ah_as_int64(args[0], &self->limit_ns) != 0)
        return NULL;
    name = PyUnicode_AsUTF8AndSize(args[1], NULL);
    if (!name)
        return NULL;
    ah_entry_text(self->name, sizeof self->name, name);
    if (args[2] != Py_None && (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != (Py_ssize_t)self->group.ranks)) {
        PyErr_SetString(PyExc_ValueError, "a global rank for each rank");
        return NULL;
    }
    if (!ah_as_recorder(args[3])) {
        PyErr_SetString(PyExc_TypeError, "not a recorder");
        return NULL;
    }
    Py_XDECREF((PyObject *)self->recorder);
    self->recorder = (struct ah_recorder_object *)Py_NewRef(args[3]);
    Py_CLEAR(self->ranks);
    if (args[2] != Py_None)
        self->ranks = Py_NewRef(args[2]);
    Py_RETURN_NONE;
}

/* The group ------------------------------------------------------------------------------------------------ */

static PyObject *end(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t rank;

    if (ah_check_argument_count(n, 1) != 0 || ah_as_uint32(args[0], &rank) != 0)
        return NULL;
    ah_group_end(&self->group, AH_ABORTED, rank);
    Py_RETURN_NONE;
}

static PyObject *leave(struct ah_segment *self, PyObject *Py_UNUSED(none))
{
    ah_group_leave(&self->group);
    /* If a call runs in spite of that, the helper threads end with the segment. */
    if (ah_call_lock_try(&self->lock)) {
        Py_BEGIN_ALLOW_THREADS
        ah_helper_threads_stop(&self->group);
        Py_END_ALLOW_THREADS
        ah_call_lock_release(&self->lock);
    }
    Py_RETURN_NONE;
}

static PyObject *set_wait_policy(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    if (ah_check_argument_count(n, 2) != 0 || ah_as_uint32(args[0], &self->group.spins) != 0 ||
        ah_as_uint32(args[1], &self->group.yields) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *enable_single_copy(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t ranks = self->group.ranks;

    if (ah_check_argument_count(n, 1) != 0)
        return NULL;
    if (self->pids || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != (Py_ssize_t)ranks) {
        PyErr_SetString(PyExc_ValueError, "a pid for each rank, once");
        return NULL;
    }
    self->pids = calloc(ranks, sizeof *self->pids);
    if (!self->pids)
        return PyErr_NoMemory();
    for (uint32_t rank = 0; rank < ranks; rank++)
        self->pids[rank] = (int)PyLong_AsLong(PyTuple_GetItem(args[0], rank));
    if (PyErr_Occurred()) {
        free(self->pids);
        self->pids = NULL;
        return NULL;
    }
    self->group.pids = ranks > 1 ? self->pids : NULL;
    Py_RETURN_NONE;
}

static PyObject *sequence(struct ah_segment *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLongLong(self->group.sequence);
}

static PyObject *culprit(struct ah_segment *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLong(self->group.culprit);
}

/* (sequence, kind, reduction, dtype, bytes, root, list digest) of a rank's call with the sequence of our last one. */
static PyObject *call(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    const struct ah_member *member;
    const struct ah_fingerprint *fingerprint;
    struct ah_call theirs;
    uint32_t rank, after = (uint32_t)self->group.call.sequence + 1;
    int begun;

    if (ah_check_argument_count(n, 1) != 0 || ah_as_uint32(args[0], &rank) != 0)
        return NULL;
    if (rank >= self->group.ranks) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return NULL;
    }
    member = &self->group.members[rank];
    fingerprint = ah_fingerprint_of(&self->group, rank);
    /* A peer's fingerprint can be read once it has begun the call; our own must be published. */
    begun = ah_has_reached(atomic_load(rank == self->group.rank ? &fingerprint->stamp : &member->begun), after);
    theirs = fingerprint->call;
    if (!begun)
        theirs.sequence = UINT64_MAX;
    if (theirs.count == 0) /* ranks may differ: the largest part of this one */
        theirs.count = fingerprint->bytes != AH_NO_PAYLOAD ? fingerprint->bytes
                                                           : atomic_load(&member->largest[(after - 1) % AH_CALL_DEPTH]);
    return Py_BuildValue("(KkkkKiK)", (unsigned long long)theirs.sequence, (unsigned long)theirs.kind,
                         (unsigned long)theirs.reduce, (unsigned long)theirs.dtype, (unsigned long long)theirs.count,
                         (int)theirs.root, (unsigned long long)theirs.list_digest);
}

/* The type ------------------------------------------------------------------------------------------------- */

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    struct ah_segment *self;
    PyObject *pidfds;
    const char *nonce;
    Py_ssize_t nonce_bytes, bytes;
    unsigned int rank;
    int fd;

    if (!PyArg_ParseTuple(args, "inIy#O!:Segment", &fd, &bytes, &rank, &nonce, &nonce_bytes, &PyTuple_Type, &pidfds))
        return NULL;
    if (nonce_bytes != 16 || bytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "a nonce of 16 bytes and a size above 0");
        return NULL;
    }
    self = (struct ah_segment *)PyType_GenericAlloc(type, PyTuple_Size(pidfds));
    if (!self)
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_Size(pidfds); index++)
        self->pidfds[index] = (int)PyLong_AsLong(PyTuple_GetItem(pidfds, index));
    self->bytes = (size_t)bytes;
    self->memory = PyErr_Occurred() ? MAP_FAILED : mmap(NULL, self->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->memory == MAP_FAILED) {
        self->memory = NULL;
        Py_DECREF((PyObject *)self);
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    }
    if (ah_segment_open(&self->group, self->memory, self->bytes, rank, (const unsigned char *)nonce, self->pidfds) !=
            AH_OK ||
        PyTuple_Size(pidfds) != (Py_ssize_t)self->group.ranks) {
        Py_DECREF((PyObject *)self);
        PyErr_SetString(PyExc_ValueError, "this is not the segment that was announced");
        return NULL;
    }
    self->group.check_interrupt = ah_check_signals;
    self->group.context = &self->thread;
    return (PyObject *)self;
}

static void unmake(struct ah_segment *self)
{
    /* No call runs any more, and helper threads do not use the GIL. */
    ah_helper_threads_stop(&self->group);
    if (self->memory)
        munmap(self->memory, self->bytes);
    free(self->pids);
    Py_XDECREF(self->ranks);
    Py_XDECREF((PyObject *)self->recorder);
    ah_object_free(self);
}

static PyMethodDef METHODS[] = {
    AH_METHOD(barrier, METH_FASTCALL, "barrier(timeout_ns) -> code"),
    AH_METHOD(compare_only, METH_FASTCALL, "compare_only(kind, reduction, dtype, bytes, root, timeout_ns) -> code"),
    AH_METHOD(all_reduce, METH_FASTCALL, "all_reduce(address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_METHOD(all_reduce_list, METH_FASTCALL, "all_reduce_list(tensors, dtype, reduction, timeout_ns) -> code"),
    AH_METHOD(reduce, METH_FASTCALL, "reduce(address, bytes, dtype, reduction, root, timeout_ns) -> code"),
    AH_METHOD(broadcast, METH_FASTCALL, "broadcast(address, bytes, dtype, root, timeout_ns) -> code"),
    AH_METHOD(all_gather, METH_FASTCALL, "all_gather(address, bytes, out, dtype, timeout_ns) -> code"),
    AH_METHOD(gather, METH_FASTCALL, "gather(address, bytes, out, dtype, root, timeout_ns) -> code"),
    AH_METHOD(scatter, METH_FASTCALL, "scatter(in, address, bytes, dtype, root, timeout_ns) -> code"),
    AH_METHOD(reduce_scatter, METH_FASTCALL,
              "reduce_scatter(in, address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_METHOD(all_to_all, METH_FASTCALL, "all_to_all(in, out, dtype, timeout_ns) -> code"),
    AH_METHOD(end, METH_FASTCALL, "end(rank): end the group because of rank"),
    AH_METHOD(set_wait_policy, METH_FASTCALL, "set_wait_policy(spins, yields): how often to poll before sleeping"),
    AH_METHOD(enable_single_copy, METH_FASTCALL,
              "enable_single_copy(pids): allow reading large tensors from the process of each rank"),
    AH_METHOD(configure_fast_path, METH_FASTCALL,
              "configure_fast_path(limit_ns, name, ranks, recorder): what the fast path needs to know of the group"),
    AH_METHOD(sequence, METH_NOARGS, "sequence() -> number of the next call"),
    {"__enter__", (PyCFunction)(void (*)(void))enter, METH_NOARGS, "Take the call lock."},
    {"__exit__", (PyCFunction)(void (*)(void))release, METH_FASTCALL, "Release the call lock."},
    AH_METHOD(call, METH_FASTCALL, "call(rank) -> (sequence, operation, reduction, dtype, bytes, root, list_digest)"),
    AH_METHOD(leave, METH_NOARGS, "leave(): this rank makes no further call"),
    AH_METHOD(culprit, METH_NOARGS, "culprit() -> rank that the last failed call is about"),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"queued", T_UINT, offsetof(struct ah_segment, queued), 0, "calls that wait for the call lock"},
    {"fast_path_closed", T_INT, offsetof(struct ah_segment, fast_path_closed), 0,
     "not 0: no more calls on the fast path"},
    {"found_mismatch", T_INT, offsetof(struct ah_segment, group.found_mismatch), READONLY,
     "not 0: this rank found the mismatch that ended the group"},
    {"window_calls", T_ULONGLONG, offsetof(struct ah_segment, group.window_calls), READONLY,
     "calls performed in a window"},
    {"single_copy_calls", T_ULONGLONG, offsetof(struct ah_segment, group.single_copy_calls), READONLY,
     "calls performed by single copy"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_members, MEMBERS},
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Segment(fd, bytes, rank, nonce, pidfds): one rank's view of a group's shared memory."},
    {0, NULL},
};

PyType_Spec ah_segment_spec = {
    .name = "allhands._core.Segment",
    .basicsize = sizeof(struct ah_segment),
    .itemsize = sizeof(int),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

struct ah_segment *ah_as_segment(PyObject *object)
{
    return ah_object_made_by(object, make);
}

/* Functions of the module ---------------------------------------------------------------------------------- */

PyObject *ah_py_segment_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, helper_threads = 0;
    Py_ssize_t slot_bytes;

    if (!PyArg_ParseTuple(args, "In|I:segment_bytes", &ranks, &slot_bytes, &helper_threads))
        return NULL;
    return PyLong_FromSize_t(ah_segment_bytes(ranks, (size_t)slot_bytes, helper_threads));
}

PyObject *ah_py_segment_format(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, helper_threads = 0;
    Py_ssize_t slot_bytes, nonce_bytes;
    const char *nonce;
    size_t bytes;
    void *memory;
    int fd, code, victim_l3 = ah_has_victim_l3();

    if (!PyArg_ParseTuple(args, "iIny#|Ip:segment_format", &fd, &ranks, &slot_bytes, &nonce, &nonce_bytes,
                          &helper_threads, &victim_l3))
        return NULL;
    if (nonce_bytes != 16 || ranks == 0 || helper_threads > AH_MAX_HELPER_THREADS) {
        PyErr_SetString(PyExc_ValueError,
                        "a nonce of 16 bytes, at least one rank, and at most MAX_HELPER_THREADS helper threads");
        return NULL;
    }
    bytes = ah_segment_bytes(ranks, (size_t)slot_bytes, helper_threads);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    ah_segment_format(memory, ranks, (size_t)slot_bytes, helper_threads, victim_l3, (const unsigned char *)nonce);
    /* Allocate every page now: a lack of memory is an error here, and SIGBUS in the middle of a copy. */
    Py_BEGIN_ALLOW_THREADS
    code = madvise(memory, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    Py_END_ALLOW_THREADS
    munmap(memory, bytes);
    if (code != 0 && code != EINVAL) { /* EINVAL: a kernel before 5.14 allocates pages when they are touched */
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}
