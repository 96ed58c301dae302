/* The Python type allhands._core.FastPath: a function of torch.distributed for callers who wait anyway. Plain tensors of
 * a group in shared memory go straight to the core; whatever is not that simple goes the slow path, as it
 * was given. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/fast_path.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "python/fast_call.h"
#include "shm/tensor_list.h"
#include "p2p/matching.h"
#include "shm/reduce.h"

/* More than any function of torch.distributed has parameters. */
#define MOST_PARAMETERS 16

/* Arguments in an array, without a tuple and a dict for each call. The limited API has a name for the flag since 3.12;
 * the bit is the same in 3.11, and so is the one that a caller sets beside the number of arguments. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))

struct fast_path {
    PyObject_HEAD
    PyObject *(*vector)(PyObject *, PyObject *const *, size_t, PyObject *);
    PyObject *dict; /* for functools.update_wrapper */
    PyObject *facts, *slow_path, *names;
    PyObject *keys[MOST_PARAMETERS]; /* what is in `names` */
    Py_ssize_t parameters;
    enum role roles[MOST_PARAMETERS];
    enum ah_operation_code kind;
    char name[sizeof((struct ah_entry *)0)->operation];
    int whole; /* one tensor where the list form has a tensor for each rank */
};

/* Sort what was given by what it is for. */
static int sort(const struct fast_path *self, PyObject *const *args, Py_ssize_t places, PyObject *keywords,
                struct ah_fast_call *call)
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

/* Whether the first dimension can be cut into one part for each rank. */
static int even(const struct ah_fast_call *call, const struct ah_tensor *tensor)
{
    return tensor->dims > 0 && tensor->shape[0] % call->locked->lock.size == 0;
}

/* The operations ------------------------------------------------------------------------------------------- */

static int barrier(struct ah_fast_call *call)
{
    return ah_fast_call_run(call, NULL, -1, &(struct ah_operation){.kind = AH_BARRIER});
}

/* Several tensors of one type, reduced as one. */
static int all_reduce_list(struct ah_fast_call *call)
{
    struct ah_operation move = {.kind = AH_ALL_REDUCE, .reduction = ah_reduction_of(call->facts, call->given[OP])};
    PyObject *given = call->given[OUT];
    Py_ssize_t number = given && PyList_Check(given) ? PyList_Size(given) : 0;
    struct ah_tensor first = {0}, each;
    int code = call->segment && number && ah_tensor_list_alloc(&move.tensors, (size_t)number) == 0 ? DONE : SLOW_PATH;

    for (Py_ssize_t index = 0; code == DONE && index < number; index++) {
        if (ah_describe_tensor(call->facts, PyList_GetItem(given, index), &each) != 0 || (index > 0 && each.dtype != first.dtype))
            code = SLOW_PATH;
        else
            move.tensors.parts[index] = each.part;
        if (index == 0)
            first = each;
    }
    if (code == DONE && (!ah_reducible(first.dtype, move.reduction) || !ah_tensor_list_is_disjoint(&move.tensors)))
        code = SLOW_PATH;
    if (code == DONE) {
        ah_tensor_list_set_ends(&move.tensors);
        first.part.bytes = move.tensors.ends[number - 1];
        code = ah_fast_call_run(call, &first, -1, &move);
    }
    ah_tensor_list_free(&move.tensors);
    return code;
}

static int all_reduce(struct ah_fast_call *call)
{
    struct ah_operation move = {.kind = AH_ALL_REDUCE, .reduction = ah_reduction_of(call->facts, call->given[OP])};
    struct ah_tensor tensor;

    if (!call->whole)
        return all_reduce_list(call);
    if (!call->given[OUT] || ah_describe_tensor(call->facts, call->given[OUT], &tensor) != 0 ||
        !ah_reducible(tensor.dtype, move.reduction))
        return SLOW_PATH;
    return ah_fast_call_run(call, &tensor, -1, &move);
}

static int reduce(struct ah_fast_call *call)
{
    struct ah_operation move = {.kind = AH_REDUCE, .reduction = ah_reduction_of(call->facts, call->given[OP])};
    struct ah_tensor tensor;
    uint32_t root;

    if (ah_fast_call_peer(call, -1, &root) != DONE || !call->given[OUT] ||
        ah_describe_tensor(call->facts, call->given[OUT], &tensor) != 0 || !ah_reducible(tensor.dtype, move.reduction))
        return SLOW_PATH;
    return ah_fast_call_run(call, &tensor, (int32_t)root, &move);
}

static int broadcast(struct ah_fast_call *call)
{
    struct ah_tensor tensor;
    uint32_t root;

    if (ah_fast_call_peer(call, -1, &root) != DONE || !call->given[OUT] || ah_describe_tensor(call->facts, call->given[OUT], &tensor) != 0)
        return SLOW_PATH;
    return ah_fast_call_run(call, &tensor, (int32_t)root, &(struct ah_operation){.kind = AH_BROADCAST});
}

static int all_gather(struct ah_fast_call *call)
{
    struct ah_operation move = {.kind = AH_ALL_GATHER, .out = call->out};
    struct ah_tensor in, out;
    int code;

    if (!call->given[IN] || !call->given[OUT] || ah_describe_tensor(call->facts, call->given[IN], &in) != 0)
        return SLOW_PATH;
    if (call->whole)
        code = ah_describe_tensor(call->facts, call->given[OUT], &out) == 0 ? ah_fast_call_split(call, out, in.part.bytes, call->out) : SLOW_PATH;
    else
        code = ah_fast_call_parts(call, call->given[OUT], call->out, &out);
    if (code != DONE || in.dtype != out.dtype)
        return SLOW_PATH;
    return ah_fast_call_run(call, &in, -1, &move);
}

static int gather(struct ah_fast_call *call)
{
    PyObject *list = call->given[OUT] == Py_None ? NULL : call->given[OUT];
    struct ah_operation move = {.kind = AH_GATHER, .out = list ? call->out : NULL};
    struct ah_tensor in, out;
    uint32_t root;

    if (ah_fast_call_peer(call, 0, &root) != DONE || (call->locked->lock.rank == root) != (list != NULL) || !call->given[IN] ||
        ah_describe_tensor(call->facts, call->given[IN], &in) != 0)
        return SLOW_PATH;
    if (list && (ah_fast_call_parts(call, list, call->out, &out) != DONE || in.dtype != out.dtype))
        return SLOW_PATH;
    return ah_fast_call_run(call, &in, (int32_t)root, &move);
}

static int scatter(struct ah_fast_call *call)
{
    PyObject *list = call->given[IN] == Py_None ? NULL : call->given[IN];
    struct ah_operation move = {.kind = AH_SCATTER, .in = list ? call->in : NULL};
    struct ah_tensor in, out;
    uint32_t root;

    if (ah_fast_call_peer(call, 0, &root) != DONE || (call->locked->lock.rank == root) != (list != NULL) || !call->given[OUT] ||
        ah_describe_tensor(call->facts, call->given[OUT], &out) != 0)
        return SLOW_PATH;
    if (list && (ah_fast_call_parts(call, list, call->in, &in) != DONE || in.dtype != out.dtype))
        return SLOW_PATH;
    return ah_fast_call_run(call, &out, (int32_t)root, &move);
}

static int reduce_scatter(struct ah_fast_call *call)
{
    uint32_t reduction = ah_reduction_of(call->facts, call->given[OP]);
    struct ah_operation move = {.kind = AH_REDUCE_SCATTER, .in = call->in, .reduction = reduction};
    struct ah_tensor in, out;
    int code;

    if (!call->given[IN] || !call->given[OUT] || ah_describe_tensor(call->facts, call->given[OUT], &out) != 0)
        return SLOW_PATH;
    if (call->whole)
        code = ah_describe_tensor(call->facts, call->given[IN], &in) == 0 ? ah_fast_call_split(call, in, out.part.bytes, call->in) : SLOW_PATH;
    else
        code = ah_fast_call_parts(call, call->given[IN], call->in, &in);
    for (uint32_t rank = 0; code == DONE && rank < call->locked->lock.size; rank++)
        code = call->in[rank].bytes == out.part.bytes ? DONE : SLOW_PATH;
    if (code != DONE || in.dtype != out.dtype || !ah_reducible(out.dtype, reduction))
        return SLOW_PATH;
    return ah_fast_call_run(call, &out, -1, &move);
}

static int all_to_all(struct ah_fast_call *call)
{
    struct ah_operation move = {.kind = AH_ALL_TO_ALL, .in = call->in, .out = call->out};
    struct ah_tensor in, out;

    if (!call->given[IN] || !call->given[OUT])
        return SLOW_PATH;
    if (call->whole) {
        if (ah_describe_tensor(call->facts, call->given[IN], &in) != 0 || ah_describe_tensor(call->facts, call->given[OUT], &out) != 0 ||
            !even(call, &in) || !even(call, &out) || in.part.bytes != out.part.bytes ||
            ah_fast_call_split(call, in, in.part.bytes / call->locked->lock.size, call->in) != DONE ||
            ah_fast_call_split(call, out, out.part.bytes / call->locked->lock.size, call->out) != DONE)
            return SLOW_PATH;
    } else if (ah_fast_call_parts(call, call->given[IN], call->in, &in) != DONE ||
               ah_fast_call_parts(call, call->given[OUT], call->out, &out) != DONE) {
        return SLOW_PATH;
    }
    return in.dtype == out.dtype ? ah_fast_call_run(call, &in, -1, &move) : SLOW_PATH;
}

/* Let the handlers of signals run; `context` is the thread's state, which changes hands. */
static int check_interrupt(void *context)
{
    PyThreadState **thread = context;
    int raised;

    PyEval_RestoreThread(*thread);
    raised = PyErr_CheckSignals();
    *thread = PyEval_SaveThread();
    return raised;
}

static int message(struct ah_fast_call *call, int sends)
{
    struct ah_message message = {.sends = sends};
    struct ah_outcome outcome;
    struct ah_tensor tensor;
    PyThreadState *thread;
    uint32_t rank;
    int code;

    if (!call->segment || !call->segment->p2p || ah_fast_call_peer(call, -1, &rank) != DONE || rank == call->locked->lock.rank)
        return SLOW_PATH;
    if (call->given[TAG] && (!PyLong_CheckExact(call->given[TAG]) || PyLong_AsLong(call->given[TAG]) < 0)) {
        PyErr_Clear();
        return SLOW_PATH;
    }
    if (!call->given[OUT] || ah_describe_tensor(call->facts, call->given[OUT], &tensor) != 0)
        return SLOW_PATH;
    message.data = tensor.part.data;
    message.bytes = tensor.part.bytes;
    message.dtype = tensor.dtype;
    message.peer = rank;
    message.tag = call->given[TAG] ? (uint64_t)PyLong_AsLong(call->given[TAG]) : 0;
    code = ah_fast_call_record(call, &tensor, 0, (int32_t)rank);
    if (code != DONE)
        return code;
    if (!ah_p2p_try(call->segment->p2p, &message, &outcome)) {
        thread = PyEval_SaveThread();
        outcome = ah_p2p_run(call->segment->p2p, &message, call->locked->lock.limit_ns,
                             &(struct ah_interrupt){.check_interrupt = check_interrupt, .context = &thread});
        PyEval_RestoreThread(thread);
    }
    call->answer = call->locked->lock.ranks ? PyLong_AsLong(PyTuple_GetItem(call->locked->lock.ranks, rank)) : (long)rank;
    return ah_fast_call_finish(call, outcome.code, outcome.peer, (int)rank);
}

static int send(struct ah_fast_call *call)
{
    return message(call, 1);
}

static int recv(struct ah_fast_call *call)
{
    return message(call, 0);
}

typedef int (*operation)(struct ah_fast_call *);

static const operation OPERATIONS[] = {
    [AH_BARRIER] = barrier,       [AH_ALL_REDUCE] = all_reduce,         [AH_REDUCE] = reduce,
    [AH_BROADCAST] = broadcast,   [AH_ALL_GATHER] = all_gather,         [AH_GATHER] = gather,
    [AH_SCATTER] = scatter,       [AH_REDUCE_SCATTER] = reduce_scatter, [AH_ALL_TO_ALL] = all_to_all,
    [AH_SEND] = send,             [AH_RECV] = recv,
};

/* The type ------------------------------------------------------------------------------------------------- */

/* As it was given, to the function that knows all ways. */
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
    struct ah_fast_call call;
    int outcome;

    /* Not the parts: they are 8 KiB, and only those that are used are written. */
    memset(&call, 0, offsetof(struct ah_fast_call, out));
    call.facts = (struct ah_torch_facts *)self->facts;
    call.name = self->name;
    call.whole = self->whole;
    outcome = sort(self, args, places, keywords, &call);
    if (outcome == DONE) {
        call.locked = ah_engine_of(call.facts, call.given[GROUP], &call.group, &call.segment);
        outcome = call.locked ? OPERATIONS[self->kind](&call) : SLOW_PATH;
        Py_XDECREF((PyObject *)call.locked);
        Py_XDECREF(call.group);
    }
    if (outcome == SLOW_PATH)
        return call_slow_path(object, args, places, keywords);
    if (outcome == RAISED)
        return NULL;
    if (self->kind == AH_RECV)
        return PyLong_FromLong(call.answer);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *facts, *slow_path, *names, *roles, *made;
    struct fast_path *self;
    const char *name;
    int kind, whole;

    if (!PyArg_ParseTuple(args, "OOsO!O!ip:FastPath", &facts, &slow_path, &name, &PyTuple_Type, &names, &PyTuple_Type, &roles,
                          &kind, &whole))
        return NULL;
    if (!ah_as_torch_facts(facts) || PyTuple_Size(names) > MOST_PARAMETERS || PyTuple_Size(names) != PyTuple_Size(roles) ||
        kind < AH_BARRIER || kind >= (int)(sizeof OPERATIONS / sizeof *OPERATIONS)) {
        PyErr_SetString(PyExc_TypeError, "FastPath(facts, slow_path, name, names, roles, kind, whole)");
        return NULL;
    }
    made = allocate(type, 0);
    if (!made)
        return NULL;
    self = (struct fast_path *)made;
    for (Py_ssize_t index = 0; index < PyTuple_Size(roles); index++) {
        long role = PyLong_AsLong(PyTuple_GetItem(roles, index));

        self->roles[index] = role >= 0 && role < ROLES ? (enum role)role : OTHER;
        self->keys[index] = PyTuple_GetItem(names, index);
    }
    self->parameters = PyTuple_Size(names);
    self->vector = vector;
    self->facts = Py_NewRef(facts);
    self->slow_path = Py_NewRef(slow_path);
    self->names = Py_NewRef(names);
    self->kind = (enum ah_operation_code)kind;
    ah_entry_text(self->name, sizeof self->name, name);
    self->whole = whole;
    return made;
}

static void unmake(PyObject *object)
{
    struct fast_path *self = (struct fast_path *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    Py_XDECREF(self->dict);
    Py_XDECREF(self->facts);
    Py_XDECREF(self->slow_path);
    Py_XDECREF(self->names);
    release(object);
    Py_DECREF(type);
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

static PyType_Spec SPEC = {
    .name = "allhands._core.FastPath",
    .basicsize = sizeof(struct fast_path),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = SLOTS,
};

PyObject *ah_fast_path_type(void)
{
    return PyType_FromSpec(&SPEC);
}
