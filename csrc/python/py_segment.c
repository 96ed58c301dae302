/* The Python type allhands._core.Segment: lets go of the interpreter, calls an operation. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/py_segment.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>
#include <sys/mman.h>

#include "python/args.h"
#include "recorder/flight_recorder.h"
#include "shm/fingerprint.h"
#include "collectives/collective.h"
#include "shm/helper_threads.h"
#include "shm/reduce.h"
#include "python/py_window.h"

/* What moves no more than this on the fast path is done before another thread would have had the interpreter. */
#define SHORT_BYTES ((size_t)4 << 10)

/* Let go of the interpreter's lock; `context` is a segment. */
static void on_long_wait(void *context)
{
    struct ah_segment *self = context;

    self->lock.thread = PyEval_SaveThread();
}

static int collect(struct ah_group *group, const struct ah_operation *move)
{
    switch (move->kind) {
    case AH_BARRIER:
        return ah_barrier(group, move->limit_ns);
    case AH_ALL_REDUCE:
        if (move->tensors.number)
            return ah_all_reduce_list(group, move->tensors, move->dtype, move->reduction, move->limit_ns);
        return ah_all_reduce(group, move->data, move->dtype, move->reduction, move->limit_ns);
    case AH_REDUCE:
        return ah_reduce_to_root(group, move->data, move->dtype, move->reduction, move->root, move->limit_ns);
    case AH_BROADCAST:
        return ah_broadcast(group, move->data, move->dtype, move->root, move->limit_ns);
    case AH_ALL_GATHER:
        return ah_all_gather(group, move->data, move->out, move->dtype, move->limit_ns);
    case AH_GATHER:
        return ah_gather(group, move->data, move->out, move->dtype, move->root, move->limit_ns);
    case AH_SCATTER:
        return ah_scatter(group, move->in, move->data, move->dtype, move->root, move->limit_ns);
    case AH_REDUCE_SCATTER:
        return ah_reduce_scatter(group, move->in, move->data, move->dtype, move->reduction, move->limit_ns);
    case AH_ALL_TO_ALL:
        return ah_all_to_all(group, move->in, move->out, move->dtype, move->limit_ns);
    default:
        return AH_INVALID;
    }
}

/* A segment's move, see struct ah_call_lock. */
static int move(void *object, struct ah_operation *move)
{
    struct ah_segment *self = object;
    int code;

    if (move->kind == AH_ALL_REDUCE && !move->tensors.number)
        ah_find_window(&self->group, &move->data);
    if (move->entry)
        self->group.now_ns = move->entry->started_ns;
    /* For what moves little, the lock is let go of only where others have to be waited for. */
    if (move->entry && move->entry->bytes <= SHORT_BYTES)
        self->group.on_long_wait = on_long_wait;
    else
        on_long_wait(self);
    code = collect(&self->group, move);
    if (self->group.on_long_wait)
        self->group.on_long_wait = NULL;
    else
        PyEval_RestoreThread(self->lock.thread);
    return code;
}

static PyObject *compare_only(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t kind, reduction, dtype;
    struct ah_call call = {0};
    int64_t limit;
    int code;

    if (ah_check_argument_count(n, 6) != 0 || ah_as_uint32(args[0], &kind) != 0 || ah_as_uint32(args[1], &reduction) != 0 ||
        ah_as_uint32(args[2], &dtype) != 0 || ah_as_int64(args[5], &limit) != 0)
        return NULL;
    call.kind = (uint16_t)kind;
    call.reduce = (uint16_t)reduction;
    call.dtype = (uint16_t)dtype;
    call.count = PyLong_AsUnsignedLongLong(args[3]);
    call.root = (int16_t)PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    AH_WITHOUT_GIL(self, code, ah_compare_only(&self->group, &call, limit));
    return ah_outcome_to_python(code);
}

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
    /* Where a call runs in spite of that, the hands go with the segment. */
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

static PyObject *culprit(struct ah_segment *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLong(self->group.culprit);
}

/* (sequence, kind, reduction, dtype, bytes, root, list digest) of the last call of a rank. */
static PyObject *call(struct ah_segment *self, PyObject *const *args, Py_ssize_t n)
{
    const struct ah_member *member;
    const struct ah_fingerprint *fingerprint;
    struct ah_call theirs;
    uint32_t rank, after = (uint32_t)self->group.call.sequence + 1;
    int came;

    if (ah_check_argument_count(n, 1) != 0 || ah_as_uint32(args[0], &rank) != 0)
        return NULL;
    if (rank >= self->group.ranks) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return NULL;
    }
    member = &self->group.members[rank];
    fingerprint = ah_fingerprint_of(&self->group, rank);
    /* Another's call is looked at once it is whole, and we ourselves came if we got as far as showing ours. */
    came = ah_has_reached(rank == self->group.rank ? atomic_load(&fingerprint->stamp) : atomic_load(&member->begun), after);
    theirs = fingerprint->call;
    if (!came)
        theirs.sequence = UINT64_MAX;
    if (theirs.count == 0) /* sizes may differ between ranks: its own largest */
        theirs.count = fingerprint->bytes != AH_NO_PAYLOAD ? fingerprint->bytes : atomic_load(&member->largest[(after - 1) % AH_CALL_DEPTH]);
    return Py_BuildValue("(KkkkKiK)", (unsigned long long)theirs.sequence, (unsigned long)theirs.kind,
                         (unsigned long)theirs.reduce, (unsigned long)theirs.dtype, (unsigned long long)theirs.count,
                         (int)theirs.root, (unsigned long long)theirs.list_digest);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *pidfds, *made;
    struct ah_segment *self;
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
    self = (struct ah_segment *)made;
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
    ah_call_lock_init(&self->lock, self->group.rank, self->group.ranks, &self->group.sequence, move);
    self->group.check_interrupt = ah_call_lock_check_signals;
    self->group.context = self;
    return made;
}

static void unmake(PyObject *object)
{
    struct ah_segment *self = (struct ah_segment *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    /* No call runs any more, and hands have no use for the interpreter's lock. */
    ah_helper_threads_stop(&self->group);
    if (self->memory)
        munmap(self->memory, self->bytes);
    free(self->pids);
    ah_call_lock_clear(&self->lock);
    release(object);
    Py_DECREF(type);
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))(name), METH_FASTCALL, text}

static PyMethodDef METHODS[] = {
    AH_OPERATION_METHOD(barrier, "barrier(timeout_ns) -> code"),
    METHOD(compare_only, "compare_only(kind, reduction, dtype, bytes, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_reduce, "all_reduce(address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_reduce_list, "all_reduce_list(tensors, dtype, reduction, timeout_ns) -> code"),
    AH_OPERATION_METHOD(reduce, "reduce(address, bytes, dtype, reduction, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(broadcast, "broadcast(address, bytes, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_gather, "all_gather(address, bytes, out, dtype, timeout_ns) -> code"),
    AH_OPERATION_METHOD(gather, "gather(address, bytes, out, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(scatter, "scatter(in, address, bytes, dtype, root, timeout_ns) -> code"),
    AH_OPERATION_METHOD(reduce_scatter, "reduce_scatter(in, address, bytes, dtype, reduction, timeout_ns) -> code"),
    AH_OPERATION_METHOD(all_to_all, "all_to_all(in, out, dtype, timeout_ns) -> code"),
    METHOD(end, "end(rank): the group is over because of rank"),
    METHOD(set_wait_policy, "set_wait_policy(spins, yields): how often to test before sleeping"),
    METHOD(enable_single_copy, "enable_single_copy(pids): large tensors may be read from the process of each rank. All ranks, before a call."),
    {"configure_fast_path", (PyCFunction)(void (*)(void))ah_call_lock_configure, METH_FASTCALL,
     "configure_fast_path(limit_ns, name, ranks, recorder): what the fast path has to know of the group"},
    {"sequence", ah_call_lock_sequence, METH_NOARGS, "sequence() -> number of the next call"},
    {"__enter__", (PyCFunction)(void (*)(void))ah_call_lock_enter, METH_NOARGS, "Wait for our turn."},
    {"__exit__", (PyCFunction)(void (*)(void))ah_call_lock_exit, METH_FASTCALL, "Let the next one have it."},
    METHOD(call, "call(rank) -> (sequence, operation, reduction, dtype, bytes, root, list_digest)"),
    {"leave", (PyCFunction)(void (*)(void))leave, METH_NOARGS, "leave(): this rank makes no further call"},
    {"culprit", (PyCFunction)(void (*)(void))culprit, METH_NOARGS, "culprit() -> rank of the last bad end"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"queued", T_UINT, offsetof(struct ah_segment, lock.queued), 0, "calls that wait for their turn"},
    {"fast_path_closed", T_INT, offsetof(struct ah_segment, lock.fast_path_closed), 0, "not 0: no more calls of the fast path"},
    {"found_mismatch", T_INT, offsetof(struct ah_segment, group.found_mismatch), READONLY, "not 0: this rank found what ended the group"},
    {"window_calls", T_ULONGLONG, offsetof(struct ah_segment, group.window_calls), READONLY, "calls that were done in a window"},
    {"victim_l3", T_INT, offsetof(struct ah_segment, group.victim_l3), READONLY, "whether caches hand over what others write: not 0"},
    {"single_copy_calls", T_ULONGLONG, offsetof(struct ah_segment, group.single_copy_calls), READONLY, "calls done by reading others' memory"},
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

static PyType_Spec SPEC = {
    .name = "allhands._core.Segment",
    .basicsize = sizeof(struct ah_segment),
    .itemsize = sizeof(int),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_segment_type(void)
{
    return PyType_FromSpec(&SPEC);
}

struct ah_segment *ah_as_segment(PyObject *object)
{
    /* The module has no state to find its types in; what makes an object tells what it is. */
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? (struct ah_segment *)object : NULL;
}

/* Functions of the module ---------------------------------------------------------------------------------- */

PyObject *ah_py_segment_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, hands = 0;
    Py_ssize_t slot_bytes;

    if (!PyArg_ParseTuple(args, "In|I:segment_bytes", &ranks, &slot_bytes, &hands))
        return NULL;
    return PyLong_FromSize_t(ah_segment_bytes(ranks, (size_t)slot_bytes, hands));
}

PyObject *ah_py_segment_format(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, hands = 0;
    Py_ssize_t slot_bytes, nonce_bytes;
    const char *nonce;
    size_t bytes;
    void *memory;
    int fd, code, victim_l3 = ah_has_victim_l3();

    if (!PyArg_ParseTuple(args, "iIny#|Ip:segment_format", &fd, &ranks, &slot_bytes, &nonce, &nonce_bytes, &hands, &victim_l3))
        return NULL;
    if (nonce_bytes != 16 || ranks == 0 || hands > AH_MAX_HELPER_THREADS) {
        PyErr_SetString(PyExc_ValueError, "a nonce of 16 bytes, at least one rank, and no more hands than MOST_HANDS");
        return NULL;
    }
    bytes = ah_segment_bytes(ranks, (size_t)slot_bytes, hands);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    ah_segment_format(memory, ranks, (size_t)slot_bytes, hands, victim_l3, (const unsigned char *)nonce);
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
