/* The Python type allhands._core.P2P: parses arguments, releases the GIL, sends and receives.
 *
 * An outcome is one number: peer << 8 | code. A request is a capsule that keeps its P2P object alive. */
#include "python/py_p2p.h"

#include <stdlib.h>
#include <unistd.h>

#include "p2p/mailbox.h"
#include "python/args.h"
#include "python/py_segment.h"

/* Most keys that one call of `progress` returns; the next call returns the others. */
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

/* NULL where a signal handler raised. */
static PyObject *as_python(struct ah_outcome outcome)
{
    if (outcome.code == AH_INTERRUPTED)
        return NULL;
    if (outcome.code == AH_PENDING)
        return PyLong_FromLong(AH_PENDING);
    return PyLong_FromUnsignedLongLong((unsigned long long)outcome.peer << 8 | (unsigned)outcome.code);
}

/* (address, bytes, dtype, peer or -1 for any, tag, timeout_ns) */
static int as_message(PyObject *const *args, int sends, struct ah_message *message, int64_t *limit)
{
    struct ah_part part;
    long peer;

    if (ah_as_part(args[0], args[1], &part) != 0 || ah_as_uint32(args[2], &message->dtype) != 0)
        return -1;
    peer = PyLong_AsLong(args[3]);
    message->data = part.data;
    message->bytes = part.bytes;
    message->peer = peer < 0 || peer > UINT32_MAX ? AH_ANY_SOURCE : (uint32_t)peer;
    message->tag = PyLong_AsUnsignedLongLong(args[4]);
    message->sends = sends;
    return PyErr_Occurred() ? -1 : ah_as_int64(args[5], limit);
}

struct ah_outcome ah_send_or_receive(struct ah_p2p *p2p, const struct ah_message *message, int64_t limit_ns)
{
    PyThreadState *thread;
    const struct ah_interrupt interrupt = {.check_interrupt = ah_check_signals, .context = &thread};
    struct ah_outcome outcome;

    if (ah_p2p_try(p2p, message, &outcome))
        return outcome;
    thread = PyEval_SaveThread();
    outcome = ah_p2p_run(p2p, message, limit_ns, &interrupt);
    PyEval_RestoreThread(thread);
    return outcome;
}

static PyObject *run(struct p2p_object *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    int64_t limit;

    if (ah_check_argument_count(n, 6) != 0 || as_message(args, sends, &message, &limit) != 0)
        return NULL;
    return as_python(ah_send_or_receive(self->p2p, &message, limit));
}

static PyObject *send(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return run(self, args, n, 1);
}

static PyObject *recv(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return run(self, args, n, 0);
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

static PyObject *post(struct p2p_object *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    struct ah_outcome outcome;
    struct ah_request *request;
    struct handle *handle;
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
    Py_BEGIN_ALLOW_THREADS
    outcome = ah_p2p_post(self->p2p, &message, limit, key, &request);
    Py_END_ALLOW_THREADS
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
    return post(self, args, n, 1);
}

static PyObject *post_recv(struct p2p_object *self, PyObject *const *args, Py_ssize_t n)
{
    return post(self, args, n, 0);
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
    PyThreadState *thread;
    const struct ah_interrupt interrupt = {.check_interrupt = ah_check_signals, .context = &thread};
    struct ah_request *request;
    struct ah_outcome outcome;
    int64_t limit;

    if (ah_check_argument_count(n, 2) != 0 || !(request = request_of(self, args[0])) ||
        ah_as_int64(args[1], &limit) != 0)
        return NULL;
    thread = PyEval_SaveThread();
    outcome = ah_p2p_wait(self->p2p, request, limit, &interrupt);
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

    if (ah_check_argument_count(n, 1) != 0 || !(request = request_of(self, args[0])))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    outcome = ah_p2p_test(self->p2p, request);
    Py_END_ALLOW_THREADS
    return as_python(outcome);
}

static PyObject *progress(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    uint64_t keys[MOST_KEYS];
    PyObject *list;
    size_t number;

    Py_BEGIN_ALLOW_THREADS
    number = ah_p2p_progress(self->p2p, keys, MOST_KEYS);
    Py_END_ALLOW_THREADS
    list = PyList_New((Py_ssize_t)number);
    for (size_t index = 0; list && index < number; index++) {
        PyObject *key = PyLong_FromUnsignedLongLong(keys[index]);

        if (!key || PyList_SetItem(list, (Py_ssize_t)index, key) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *stop(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
    ah_p2p_stop(self->p2p);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *wake_all(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    ah_mailbox_wake_all(self->group);
    Py_RETURN_NONE;
}

static PyObject *pending_sends(struct p2p_object *self, PyObject *Py_UNUSED(none))
{
    size_t number;

    Py_BEGIN_ALLOW_THREADS
    number = ah_p2p_pending_sends(self->p2p);
    Py_END_ALLOW_THREADS
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

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    struct ah_segment *shared;
    struct p2p_object *self;
    PyObject *segment;

    if (!PyArg_ParseTuple(args, "O:P2P", &segment))
        return NULL;
    shared = ah_as_segment(segment);
    if (!shared) {
        PyErr_SetString(PyExc_TypeError, "P2P takes a Segment");
        return NULL;
    }
    self = (struct p2p_object *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->segment = Py_NewRef(segment);
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

static void unmake(struct p2p_object *self)
{
    if (self->p2p) {
        ah_as_segment(self->segment)->p2p = NULL;
        ah_p2p_free(self->p2p);
    }
    Py_XDECREF(self->segment);
    ah_object_free(self);
}

static PyMethodDef METHODS[] = {
    AH_METHOD(send, METH_FASTCALL, "send(address, bytes, dtype, dest, tag, timeout_ns) -> outcome"),
    AH_METHOD(recv, METH_FASTCALL, "recv(address, bytes, dtype, source, tag, timeout_ns) -> outcome; source -1: any"),
    AH_METHOD(post_send, METH_FASTCALL,
              "post_send(address, bytes, dtype, dest, tag, timeout_ns, key) -> outcome or request"),
    AH_METHOD(post_recv, METH_FASTCALL,
              "post_recv(address, bytes, dtype, source, tag, timeout_ns, key) -> outcome or request"),
    AH_METHOD(wait, METH_FASTCALL, "wait(request, limit_ns) -> outcome, or -1 if it is not complete"),
    AH_METHOD(start_timeout, METH_FASTCALL,
              "start_timeout(request): start its timeout, as a wait without a limit does"),
    AH_METHOD(test, METH_FASTCALL, "test(request) -> outcome, or -1 if it is not complete"),
    AH_METHOD(progress, METH_NOARGS, "progress() -> keys of posted messages that are complete; none once stopped"),
    AH_METHOD(stop, METH_NOARGS, "stop(): abort all pending messages of this rank"),
    AH_METHOD(wake_all, METH_NOARGS, "wake_all(): wake all sleeping ranks, which check whether the group has ended"),
    AH_METHOD(pending_sends, METH_NOARGS, "pending_sends() -> number of posted sends that are not complete"),
    AH_METHOD(mismatch, METH_NOARGS,
              "mismatch() -> (source, target, tag, dtype, bytes, dtype, bytes) of the first message "
              "that did not fit its receive, or None"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "P2P(segment): one rank's messages to and from single ranks. One for each Segment."},
    {0, NULL},
};

PyType_Spec ah_p2p_spec = {
    .name = "allhands._core.P2P",
    .basicsize = sizeof(struct p2p_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};
