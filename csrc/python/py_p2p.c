/* The Python type allhands._core.P2P: takes arguments apart, lets go of the interpreter, sends and receives.
 *
 * Outcomes are one number: peer << 8 | code. A request is a capsule that keeps its Mail alive. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/py_p2p.h"

#include <stdlib.h>
#include <unistd.h>

#include "python/args.h"
#include "python/py_segment.h"
#include "p2p/mailbox.h"
#include "p2p/matching.h"

/* Keys that one `serve` brings at most; more come with the next one. */
#define MOST_KEYS 64

static const char REQUEST[] = "allhands._core.request";

struct p2p_object {
    PyObject_HEAD
    PyObject *segment;
    struct ah_group *group;
    struct ah_p2p *p2p;
    pid_t process;
};

struct handle {
    PyObject *owner; /* keeps the P2P object alive */
    struct ah_request *request;
};

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

/* Nothing where a handler raised. */
static PyObject *as_python(struct ah_outcome outcome)
{
    if (outcome.code == AH_INTERRUPTED)
        return NULL;
    if (outcome.code == AH_PENDING)
        return PyLong_FromLong(AH_PENDING);
    return PyLong_FromUnsignedLongLong((unsigned long long)outcome.peer << 8 | (unsigned)outcome.code);
}

/* address, bytes, dtype, peer (-1 for anyone), tag, timeout_ns */
static int as_message(PyObject *const *args, int sends, struct ah_message *message, int64_t *limit)
{
    void *data = PyLong_AsVoidPtr(args[0]);
    long peer;

    /* A tensor without elements may have no address; arithmetic on none is not defined. */
    message->data = data ? data : (unsigned char *)"";
    message->bytes = PyLong_AsSize_t(args[1]);
    message->dtype = (uint32_t)PyLong_AsUnsignedLong(args[2]);
    peer = PyLong_AsLong(args[3]);
    message->peer = peer < 0 || peer > UINT32_MAX ? AH_ANY_SOURCE : (uint32_t)peer;
    message->tag = PyLong_AsUnsignedLongLong(args[4]);
    message->sends = sends;
    *limit = PyLong_AsLongLong(args[5]);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *send_or_receive(struct p2p_object *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    struct ah_outcome outcome;
    PyThreadState *thread;
    int64_t limit;

    if (ah_check_argument_count(n, 6) != 0 || as_message(args, sends, &message, &limit) != 0)
        return NULL;
    if (ah_p2p_try(self->p2p, &message, &outcome))
        return as_python(outcome);
    thread = PyEval_SaveThread();
    outcome = ah_p2p_run(self->p2p, &message, limit, &(struct ah_interrupt){.check_interrupt = check_interrupt, .context = &thread});
    PyEval_RestoreThread(thread);
    return as_python(outcome);
}

static PyObject *send(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return send_or_receive(self, args, n, 1);
}

static PyObject *recv(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return send_or_receive(self, args, n, 0);
}

static void free_handle(PyObject *capsule)
{
    struct handle *handle = PyCapsule_GetPointer(capsule, REQUEST);
    const struct p2p_object *owner;

    if (!handle)
        return;
    owner = (const struct p2p_object *)handle->owner;
    /* A forked child has copies of its parent's requests and is not in the group. */
    if (owner->process == getpid())
        ah_p2p_free_request(owner->p2p, handle->request);
    Py_DECREF(handle->owner);
    free(handle);
}

static PyObject *post_either(struct p2p_object *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    struct ah_outcome outcome;
    struct ah_request *request;
    struct handle *handle;
    PyThreadState *thread;
    PyObject *capsule;
    uint64_t key;
    int64_t limit;

    if (ah_check_argument_count(n, 7) != 0 || as_message(args, sends, &message, &limit) != 0)
        return NULL;
    key = PyLong_AsUnsignedLongLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    handle = malloc(sizeof *handle);
    if (!handle)
        return PyErr_NoMemory();
    thread = PyEval_SaveThread();
    outcome = ah_p2p_post(self->p2p, &message, limit, key, &request);
    PyEval_RestoreThread(thread);
    if (!request) {
        free(handle);
        return as_python(outcome);
    }
    *handle = (struct handle){.owner = Py_NewRef((PyObject *)self), .request = request};
    capsule = PyCapsule_New(handle, REQUEST, free_handle);
    if (!capsule) {
        ah_p2p_free_request(self->p2p, request);
        Py_DECREF(handle->owner);
        free(handle);
    }
    return capsule;
}

static PyObject *post_send(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return post_either(self, args, n, 1);
}

static PyObject *post_recv(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return post_either(self, args, n, 0);
}

static struct ah_request *request_of(const struct p2p_object *self, PyObject *capsule)
{
    struct handle *handle = PyCapsule_GetPointer(capsule, REQUEST);

    if (handle && handle->owner != (PyObject *)self) {
        PyErr_SetString(PyExc_ValueError, "the request belongs to another P2P object");
        return NULL;
    }
    return handle ? handle->request : NULL;
}

static PyObject *wait(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_request *request;
    struct ah_outcome outcome;
    PyThreadState *thread;
    int64_t limit;

    if (ah_check_argument_count(n, 2) != 0 || !(request = request_of(self, args[0])))
        return NULL;
    limit = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    thread = PyEval_SaveThread();
    outcome = ah_p2p_wait(self->p2p, request, limit, &(struct ah_interrupt){.check_interrupt = check_interrupt, .context = &thread});
    PyEval_RestoreThread(thread);
    return as_python(outcome);
}

static PyObject *start_timeout(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_request *request;

    if (ah_check_argument_count(n, 1) != 0 || !(request = request_of(self, args[0])))
        return NULL;
    ah_p2p_start_timeout(self->p2p, request);
    Py_RETURN_NONE;
}

static PyObject *test(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_request *request;
    struct ah_outcome outcome;
    PyThreadState *thread;

    if (ah_check_argument_count(n, 1) != 0 || !(request = request_of(self, args[0])))
        return NULL;
    thread = PyEval_SaveThread();
    outcome = ah_p2p_test(self->p2p, request);
    PyEval_RestoreThread(thread);
    return as_python(outcome);
}

static PyObject *progress(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    uint64_t keys[MOST_KEYS];
    PyThreadState *thread;
    PyObject *list;
    size_t number;

    thread = PyEval_SaveThread();
    number = ah_p2p_progress(self->p2p, keys, MOST_KEYS);
    PyEval_RestoreThread(thread);
    list = PyList_New((Py_ssize_t)number);
    for (size_t index = 0; list && index < number; index++) {
        PyObject *key = PyLong_FromUnsignedLongLong(keys[index]);

        if (!key || PyList_SetItem(list, (Py_ssize_t)index, key) != 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *stop(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    PyThreadState *thread = PyEval_SaveThread();

    ah_p2p_stop(self->p2p);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *wake_all(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    ah_mailbox_wake_all(self->group);
    Py_RETURN_NONE;
}

static PyObject *pending_sends(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    PyThreadState *thread = PyEval_SaveThread();
    size_t number = ah_p2p_pending_sends(self->p2p);

    PyEval_RestoreThread(thread);
    return PyLong_FromSize_t(number);
}

static PyObject *mismatch(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    const struct ah_message_mismatch *found = ah_message_mismatch_of(self->group);

    if (atomic_load(&found->whole) == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("(kkKkKkK)", (unsigned long)found->source, (unsigned long)found->target,
                         (unsigned long long)found->tag, (unsigned long)found->sent_dtype,
                         (unsigned long long)found->sent_bytes, (unsigned long)found->wanted_dtype,
                         (unsigned long long)found->wanted_bytes);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct ah_segment *shared;
    struct p2p_object *self;
    PyObject *segment;

    if (keywords && PyDict_Size(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "P2P takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O:P2P", &segment))
        return NULL;
    shared = ah_as_segment(segment);
    if (!shared) {
        PyErr_SetString(PyExc_TypeError, "P2P takes a Segment");
        return NULL;
    }
    self = (struct p2p_object *)allocate(type, 0);
    if (!self)
        return NULL;
    self->segment = segment;
    Py_INCREF(segment);
    self->group = &shared->group;
    self->process = getpid();
    self->p2p = ah_p2p_open(self->group);
    if (!self->p2p) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    shared->p2p = self->p2p;
    return (PyObject *)self;
}

static void unmake(PyObject *object)
{
    struct p2p_object *self = (struct p2p_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->p2p) {
        ah_as_segment(self->segment)->p2p = NULL;
        ah_p2p_free(self->p2p);
    }
    Py_XDECREF(self->segment);
    release(object);
    Py_DECREF(type);
}

#define FAST(name, text) {#name, (PyCFunction)(void (*)(void))(name), METH_FASTCALL, text}
#define BARE(name, text) {#name, (PyCFunction)(void (*)(void))(name), METH_NOARGS, text}

static PyMethodDef METHODS[] = {
    FAST(send, "send(address, bytes, dtype, dest, tag, timeout_ns) -> outcome"),
    FAST(recv, "recv(address, bytes, dtype, source, tag, timeout_ns) -> outcome; source -1: anyone"),
    FAST(post_send, "post_send(address, bytes, dtype, dest, tag, timeout_ns, key) -> outcome or request"),
    FAST(post_recv, "post_recv(address, bytes, dtype, source, tag, timeout_ns, key) -> outcome or request"),
    FAST(wait, "wait(request, limit_ns) -> outcome, or -1 where it is still under way"),
    FAST(start_timeout, "due(request): its timeout begins now, as in a wait without a limit"),
    FAST(test, "test(request) -> outcome, or -1 where it is still under way"),
    BARE(progress, "serve() -> keys of posted messages that are over; none once stopped"),
    BARE(stop, "stop(): end all that this rank has under way"),
    BARE(wake_all, "ring(): wake everyone who sleeps, to test whether the group is over"),
    BARE(pending_sends, "unsent() -> how many posted sends are under way"),
    BARE(mismatch, "odd() -> (source, target, tag, dtype, bytes, dtype, bytes) of the first message that did not fit, or None"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "P2P(segment): one rank's messages to and from single ranks. One for each Segment."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.P2P",
    .basicsize = sizeof(struct p2p_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_p2p_type(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
