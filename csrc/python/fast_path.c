/* The Python type allhands._core.FastPath: a synchronous function of torch.distributed. Plain tensors of a group in
 * shared memory are passed to the core directly; every other call takes the slow path with its arguments unchanged. */
#include "python/object.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "p2p/matching.h"
#include "python/py_p2p.h"
#include "python/torch_facts.h"
#include "shm/reduce.h"
#include "shm/tensor_list.h"

/* More than any function of torch.distributed has parameters. */
#define MOST_PARAMETERS 16

/* Vectorcall: arguments in an array, without a tuple and a dict for each call. The limited API has a name for the flag
 * since 3.12; the bit is the same in 3.11, and so is the one that a caller sets beside the number of arguments. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))

/* Roles of parameters; groups/arguments.py uses the same numbers. */
enum role { OUT, IN, OP, GROUP, ASYNC, PEER, GROUP_PEER, TAG, OTHER, ROLES };

/* Result of the fast path; SLOW_PATH: nothing was done. */
enum outcome { DONE = 0, SLOW_PATH = 1, RAISED = -1 };

struct fast_path {
    PyObject_HEAD
    PyObject *(*vector)(PyObject *, PyObject *const *, size_t, PyObject *);
    PyObject *dict; /* for functools.update_wrapper */
    PyObject *args; /* of the constructor: owns the objects below */
    PyObject *facts, *slow_path;
    PyObject *keys[MOST_PARAMETERS]; /* names of the parameters */
    Py_ssize_t parameters;
    enum role roles[MOST_PARAMETERS];
    enum ah_operation_code kind;
    char name[sizeof((struct ah_entry *)0)->operation];
    int whole; /* one tensor where the list form has a tensor for each rank */
};

/* One call. */
struct call {
    const struct fast_path *function;
    struct ah_torch_facts *facts;
    struct ah_segment *segment;
    PyObject *group;
    PyObject *given[ROLES]; /* borrowed; NULL where not given */
    struct ah_entry *entry;
    uint64_t number;
    int64_t began_ns;
    long source; /* recv: the global rank of the sender */
    struct ah_part out[AH_MAX_RANKS], in[AH_MAX_RANKS];
};

/* Arguments ------------------------------------------------------------------------------------------------ */

/* Sort the arguments by role. */
static int sort(const struct fast_path *self, PyObject *const *args, Py_ssize_t places, PyObject *keywords,
                struct call *call)
{
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;

    if (places > self->parameters)
        return SLOW_PATH;
    for (Py_ssize_t place = 0; place < places; place++) {
        if (self->roles[place] != OTHER)
            call->given[self->roles[place]] = args[place];
        else if (args[place] != Py_None)
            return SLOW_PATH;
    }
    for (Py_ssize_t index = 0; index < named; index++) {
        PyObject *key = PyTuple_GetItem(keywords, index), *value = args[places + index];
        Py_ssize_t place = places;

        while (place < self->parameters && self->keys[place] != key)
            place++;
        /* Keywords of a call are interned, as the names are. One that is not takes the slow path, as an unknown one. */
        if (place == self->parameters || (self->roles[place] == OTHER && value != Py_None))
            return SLOW_PATH;
        call->given[self->roles[place]] = value;
    }
    if (call->given[ASYNC] && call->given[ASYNC] != Py_False)
        return SLOW_PATH;
    return DONE;
}

/* Describe the tensor given for `role`. */
static int tensor_of(const struct call *call, enum role role, struct ah_tensor *tensor)
{
    PyObject *given = call->given[role];

    return given && ah_describe_tensor(call->facts, given, tensor) == 0 ? DONE : SLOW_PATH;
}

/* Find the reduction, and check that it is defined on the dtype. */
static int reduction_of(const struct call *call, uint32_t dtype, uint32_t *reduction)
{
    *reduction = ah_reduction_of(call->facts, call->given[OP]);
    return ah_reducible(dtype, *reduction) ? DONE : SLOW_PATH;
}

/* Find the group rank that the call names, as a group rank or a global one. If it names none: `fallback`, unless
 * negative. */
static int peer_of(const struct call *call, int fallback, uint32_t *rank)
{
    PyObject *own = call->given[GROUP_PEER], *global = call->given[PEER];
    int named = own && own != Py_None, found;
    long value;

    if (named && global && global != Py_None)
        return SLOW_PATH; /* torch explains what is wrong with that */
    if (!named && (!global || global == Py_None)) {
        if (fallback < 0)
            return SLOW_PATH;
        value = fallback;
    } else {
        if (!PyLong_CheckExact(named ? own : global))
            return SLOW_PATH;
        value = PyLong_AsLong(named ? own : global);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return SLOW_PATH;
        }
    }
    if (!named && call->segment->ranks) {
        for (found = 0; found < (int)call->segment->group.ranks; found++) {
            if (PyLong_AsLong(PyTuple_GetItem(call->segment->ranks, found)) == value)
                break;
        }
        value = found;
    }
    *rank = (uint32_t)value;
    return value >= 0 && value < (long)call->segment->group.ranks ? DONE : SLOW_PATH;
}

/* Instead of the bytes of a part: the first dimension is cut into equal parts. */
#define EVENLY SIZE_MAX

/* Fill in `parts` from the argument for `role`: a list of a tensor for each rank, all of the dtype of `first`, or one
 * tensor that is cut into parts of `bytes`. */
static int parts_of(const struct call *call, enum role role, size_t bytes, struct ah_part *parts,
                    struct ah_tensor *first)
{
    uint32_t ranks = call->segment->group.ranks;
    PyObject *list = call->given[role];
    struct ah_tensor each;

    if (call->function->whole) {
        if (tensor_of(call, role, first) != DONE)
            return SLOW_PATH;
        if (bytes == EVENLY) {
            if (first->dims == 0 || first->shape[0] % ranks != 0)
                return SLOW_PATH;
            bytes = first->part.bytes / ranks;
        }
        if (first->part.bytes != bytes * ranks)
            return SLOW_PATH;
        for (uint32_t rank = 0; rank < ranks; rank++)
            parts[rank] = (struct ah_part){.data = first->part.data + rank * bytes, .bytes = bytes};
        return DONE;
    }
    if (!list || !PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)ranks)
        return SLOW_PATH;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (ah_describe_tensor(call->facts, PyList_GetItem(list, rank), &each) != 0 ||
            (rank > 0 && each.dtype != first->dtype))
            return SLOW_PATH;
        parts[rank] = each.part;
        if (rank == 0)
            *first = each;
    }
    return DONE;
}

/* Performing a call ---------------------------------------------------------------------------------------- */

/* As large as the fields of an entry, so that they are copied without being measured. */
#define NAME(name, number, text) [number] = text,
static const char DTYPES[AH_RAW + 1][sizeof((struct ah_entry *)0)->dtype] = {AH_DTYPES(NAME)[AH_RAW] = "bytes"};
static const char REDUCTIONS[AH_PREMUL_SUM + 1][sizeof((struct ah_entry *)0)->reduction] = {AH_REDUCTIONS(NAME)};

/* Write the entry of the call, about the tensor `shown`. */
static int record(struct call *call, const struct ah_tensor *shown, uint32_t reduction, int32_t root)
{
    const struct ah_segment *segment = call->segment;
    struct ah_entry *entry;

    entry = ah_entry_begin(&segment->recorder->recorder);
    memcpy(entry->operation, call->function->name, sizeof entry->operation);
    memcpy(entry->group, segment->name, sizeof entry->group);
    memcpy(entry->dtype, DTYPES[shown ? shown->dtype : 0], sizeof entry->dtype);
    memcpy(entry->reduction, REDUCTIONS[reduction], sizeof entry->reduction);
    entry->bytes = shown ? shown->part.bytes : 0;
    entry->root = root;
    entry->sequence = segment->group.sequence;
    entry->main_thread = PyThread_get_thread_ident() == segment->recorder->main_thread;
    entry->dims = 0;
    if (shown) {
        entry->dims = shown->dims;
        memcpy(entry->shape, shown->shape, sizeof entry->shape);
    }
    if (ah_call_site(call->facts, entry->site, sizeof entry->site) != 0) {
        ah_entry_set_state(entry, AH_ENTRY_FAILED);
        return RAISED;
    }
    ah_entry_set_state(entry, AH_ENTRY_RUNNING);
    call->entry = entry;
    call->number = entry->number;
    call->began_ns = entry->started_ns;
    return DONE;
}

/* Close the entry and let the group raise a failure; `peer` is that of a message, -1 for a collective. */
static int finish(struct call *call, int code, uint32_t culprit, int peer)
{
    char site[sizeof call->entry->site];
    PyObject *raised;

    memcpy(site, call->entry->site, sizeof site);
    /* If more calls are pending than there are entries, the entry may belong to another one by now. */
    if (call->entry->number == call->number)
        ah_entry_set_state(call->entry, code == AH_OK ? AH_ENTRY_DONE : AH_ENTRY_FAILED);
    if (code == AH_OK)
        return DONE;
    if (code != AH_INTERRUPTED) {
        raised = PyObject_CallMethod(call->group, "failed", "iI(ssd)i", code, (unsigned int)culprit,
                                     call->function->name, site, (double)call->began_ns / 1e9, peer);
        Py_XDECREF(raised);
        if (raised)
            PyErr_SetString(PyExc_SystemError, "the group did not say what went wrong");
    }
    return RAISED;
}

/* Perform an operation with the tensor `shown` (NULL for none). `operation` has the reduction, the list and the parts
 * for each rank; the rest is filled in. A root of -1 is none. */
static int run(struct call *call, const struct ah_tensor *shown, int32_t root, struct ah_operation *operation)
{
    struct ah_segment *segment = call->segment;
    uint32_t culprit;
    int code;

    if (!ah_call_lock_try(&segment->lock))
        return SLOW_PATH;
    code = record(call, shown, operation->reduction, root);
    if (code != DONE) {
        ah_call_lock_release(&segment->lock);
        return code;
    }
    operation->kind = call->function->kind;
    if (shown) {
        operation->data = shown->part;
        operation->dtype = shown->dtype;
    }
    operation->root = (uint32_t)root;
    operation->limit_ns = segment->limit_ns;
    operation->entry = call->entry;
    code = ah_segment_run(segment, operation);
    culprit = segment->group.culprit;
    ah_call_lock_release(&segment->lock);
    return finish(call, code, culprit, -1);
}

/* The operations ------------------------------------------------------------------------------------------- */

static int barrier(struct call *call)
{
    return run(call, NULL, -1, &(struct ah_operation){0});
}

/* Several tensors of one dtype, reduced as one. */
static int all_reduce_list(struct call *call)
{
    PyObject *given = call->given[OUT];
    Py_ssize_t number = given && PyList_Check(given) ? PyList_Size(given) : 0;
    struct ah_operation operation = {0};
    struct ah_tensor first = {0}, each;
    int code = number && ah_tensor_list_alloc(&operation.tensors, (size_t)number) == 0 ? DONE : SLOW_PATH;

    for (Py_ssize_t index = 0; code == DONE && index < number; index++) {
        if (ah_describe_tensor(call->facts, PyList_GetItem(given, index), &each) != 0 ||
            (index > 0 && each.dtype != first.dtype))
            code = SLOW_PATH;
        else
            operation.tensors.parts[index] = each.part;
        if (index == 0)
            first = each;
    }
    if (code == DONE)
        code = reduction_of(call, first.dtype, &operation.reduction);
    if (code == DONE && !ah_tensor_list_is_disjoint(&operation.tensors))
        code = SLOW_PATH;
    if (code == DONE) {
        ah_tensor_list_set_ends(&operation.tensors);
        first.part.bytes = operation.tensors.ends[number - 1];
        code = run(call, &first, -1, &operation);
    }
    ah_tensor_list_free(&operation.tensors);
    return code;
}

static int all_reduce(struct call *call)
{
    struct ah_operation operation = {0};
    struct ah_tensor tensor;

    if (!call->function->whole)
        return all_reduce_list(call);
    if (tensor_of(call, OUT, &tensor) != DONE || reduction_of(call, tensor.dtype, &operation.reduction) != DONE)
        return SLOW_PATH;
    return run(call, &tensor, -1, &operation);
}

static int reduce(struct call *call)
{
    struct ah_operation operation = {0};
    struct ah_tensor tensor;
    uint32_t root;

    if (peer_of(call, -1, &root) != DONE || tensor_of(call, OUT, &tensor) != DONE ||
        reduction_of(call, tensor.dtype, &operation.reduction) != DONE)
        return SLOW_PATH;
    return run(call, &tensor, (int32_t)root, &operation);
}

static int broadcast(struct call *call)
{
    struct ah_tensor tensor;
    uint32_t root;

    if (peer_of(call, -1, &root) != DONE || tensor_of(call, OUT, &tensor) != DONE)
        return SLOW_PATH;
    return run(call, &tensor, (int32_t)root, &(struct ah_operation){0});
}

static int all_gather(struct call *call)
{
    struct ah_tensor in, out;

    if (tensor_of(call, IN, &in) != DONE || parts_of(call, OUT, in.part.bytes, call->out, &out) != DONE ||
        in.dtype != out.dtype)
        return SLOW_PATH;
    return run(call, &in, -1, &(struct ah_operation){.out = call->out});
}

/* gather and scatter: each rank has a tensor of role `one`, the root also a list of role `all`. */
static int with_list_at_root(struct call *call, enum role one, enum role all, struct ah_part *parts)
{
    int has_list = call->given[all] && call->given[all] != Py_None;
    struct ah_operation operation = {0};
    struct ah_tensor tensor, first;
    uint32_t root;

    if (peer_of(call, 0, &root) != DONE || (call->segment->group.rank == root) != has_list ||
        tensor_of(call, one, &tensor) != DONE)
        return SLOW_PATH;
    if (has_list && (parts_of(call, all, 0, parts, &first) != DONE || tensor.dtype != first.dtype))
        return SLOW_PATH;
    *(all == OUT ? &operation.out : &operation.in) = has_list ? parts : NULL;
    return run(call, &tensor, (int32_t)root, &operation);
}

static int gather(struct call *call)
{
    return with_list_at_root(call, IN, OUT, call->out);
}

static int scatter(struct call *call)
{
    return with_list_at_root(call, OUT, IN, call->in);
}

static int reduce_scatter(struct call *call)
{
    struct ah_operation operation = {.in = call->in};
    struct ah_tensor in, out;

    if (tensor_of(call, OUT, &out) != DONE || parts_of(call, IN, out.part.bytes, call->in, &in) != DONE ||
        in.dtype != out.dtype || reduction_of(call, out.dtype, &operation.reduction) != DONE)
        return SLOW_PATH;
    for (uint32_t rank = 0; rank < call->segment->group.ranks; rank++) {
        if (call->in[rank].bytes != out.part.bytes)
            return SLOW_PATH;
    }
    return run(call, &out, -1, &operation);
}

static int all_to_all(struct call *call)
{
    struct ah_tensor in, out;

    if (parts_of(call, IN, EVENLY, call->in, &in) != DONE || parts_of(call, OUT, EVENLY, call->out, &out) != DONE ||
        in.dtype != out.dtype || (call->function->whole && in.part.bytes != out.part.bytes))
        return SLOW_PATH;
    return run(call, &in, -1, &(struct ah_operation){.in = call->in, .out = call->out});
}

/* send and recv. */
static int message(struct call *call)
{
    struct ah_message message = {.sends = call->function->kind == AH_SEND};
    const struct ah_segment *segment = call->segment;
    struct ah_outcome outcome;
    struct ah_tensor tensor;
    long tag = 0;
    int code;

    if (!segment->p2p || peer_of(call, -1, &message.peer) != DONE || message.peer == segment->group.rank)
        return SLOW_PATH;
    if (call->given[TAG] && (!PyLong_CheckExact(call->given[TAG]) || (tag = PyLong_AsLong(call->given[TAG])) < 0)) {
        PyErr_Clear();
        return SLOW_PATH;
    }
    if (tensor_of(call, OUT, &tensor) != DONE)
        return SLOW_PATH;
    message.data = tensor.part.data;
    message.bytes = tensor.part.bytes;
    message.dtype = tensor.dtype;
    message.tag = (uint64_t)tag;
    code = record(call, &tensor, 0, (int32_t)message.peer);
    if (code != DONE)
        return code;
    outcome = ah_send_or_receive(segment->p2p, &message, segment->limit_ns);
    call->source = segment->ranks ? PyLong_AsLong(PyTuple_GetItem(segment->ranks, message.peer)) : (long)message.peer;
    return finish(call, outcome.code, outcome.peer, (int)message.peer);
}

typedef int (*operation)(struct call *);

static const operation OPERATIONS[] = {
    [AH_BARRIER] = barrier,     [AH_ALL_REDUCE] = all_reduce,         [AH_REDUCE] = reduce,
    [AH_BROADCAST] = broadcast, [AH_ALL_GATHER] = all_gather,         [AH_GATHER] = gather,
    [AH_SCATTER] = scatter,     [AH_REDUCE_SCATTER] = reduce_scatter, [AH_ALL_TO_ALL] = all_to_all,
    [AH_SEND] = message,        [AH_RECV] = message,
};

/* The type ------------------------------------------------------------------------------------------------- */

static PyObject *call(PyObject *object, PyObject *args, PyObject *keywords)
{
    return PyObject_Call(((struct fast_path *)object)->slow_path, args, keywords);
}

static PyObject *call_slow_path(PyObject *object, PyObject *const *args, Py_ssize_t places, PyObject *keywords)
{
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    PyObject *placed = PyTuple_New(places), *others = named ? PyDict_New() : NULL, *result = NULL;
    int well = placed && (others || !named);

    for (Py_ssize_t place = 0; well && place < places; place++)
        PyTuple_SetItem(placed, place, Py_NewRef(args[place]));
    for (Py_ssize_t index = 0; well && index < named; index++)
        well = PyDict_SetItem(others, PyTuple_GetItem(keywords, index), args[places + index]) == 0;
    if (well)
        result = call(object, placed, others);
    Py_XDECREF(placed);
    Py_XDECREF(others);
    return result;
}

static PyObject *vector(PyObject *object, PyObject *const *args, size_t flagged, PyObject *keywords)
{
    Py_ssize_t places = (Py_ssize_t)(flagged & ~ARGUMENTS_OFFSET);
    struct fast_path *self = (struct fast_path *)object;
    struct call call;
    int outcome;

    /* Not the parts: they are 12 KiB, and only those that are used are written. */
    memset(&call, 0, offsetof(struct call, out));
    call.function = self;
    call.facts = (struct ah_torch_facts *)self->facts;
    outcome = sort(self, args, places, keywords, &call);
    if (outcome == DONE) {
        call.segment = ah_segment_of(call.facts, call.given[GROUP], &call.group);
        outcome = call.segment ? OPERATIONS[self->kind](&call) : SLOW_PATH;
        Py_XDECREF((PyObject *)call.segment);
        Py_XDECREF(call.group);
    }
    if (outcome == SLOW_PATH)
        return call_slow_path(object, args, places, keywords);
    if (outcome == RAISED)
        return NULL;
    if (self->kind == AH_RECV)
        return PyLong_FromLong(call.source);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *facts, *slow_path, *names, *roles;
    struct fast_path *self;
    const char *name;
    int kind, whole;

    if (!PyArg_ParseTuple(args, "OOsO!O!ip:FastPath", &facts, &slow_path, &name, &PyTuple_Type, &names,
                          &PyTuple_Type, &roles, &kind, &whole))
        return NULL;
    if (!ah_as_torch_facts(facts) || PyTuple_Size(names) > MOST_PARAMETERS ||
        PyTuple_Size(names) != PyTuple_Size(roles) ||
        kind < AH_BARRIER || kind >= (int)(sizeof OPERATIONS / sizeof *OPERATIONS)) {
        PyErr_SetString(PyExc_TypeError, "FastPath(facts, slow_path, name, names, roles, kind, whole)");
        return NULL;
    }
    self = (struct fast_path *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_Size(roles); index++) {
        long role = PyLong_AsLong(PyTuple_GetItem(roles, index));

        self->roles[index] = role >= 0 && role < ROLES ? (enum role)role : OTHER;
        self->keys[index] = PyTuple_GetItem(names, index);
    }
    self->args = Py_NewRef(args);
    self->parameters = PyTuple_Size(names);
    self->vector = vector;
    self->facts = facts;
    self->slow_path = slow_path;
    self->kind = (enum ah_operation_code)kind;
    ah_entry_text(self->name, sizeof self->name, name);
    self->whole = whole;
    return (PyObject *)self;
}

static void unmake(struct fast_path *self)
{
    Py_XDECREF(self->dict);
    Py_XDECREF(self->args);
    ah_object_free(self);
}

/* Pickled by name, as a function is. */
static PyObject *pickled(PyObject *object, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttrString(object, "__name__");
}

static PyMethodDef METHODS[] = {
    {"__reduce__", pickled, METH_NOARGS, "Pickled by name, as a function is."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(struct fast_path, vector), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(struct fast_path, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef GETSET[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_call, call},
    {Py_tp_methods, METHODS},
    {Py_tp_members, MEMBERS},
    {Py_tp_getset, GETSET},
    {0, NULL},
};

PyType_Spec ah_fast_path_spec = {
    .name = "allhands._core.FastPath",
    .basicsize = sizeof(struct fast_path),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = SLOTS,
};
