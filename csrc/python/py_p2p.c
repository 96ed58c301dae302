/* The Python type allhands._core.Mail: takes arguments apart, lets go of the interpreter, sends and receives.
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

struct post {
    PyObject_HEAD
    PyObject *segment;
    struct ah_group *group;
    struct ah_mail *mail;
    pid_t process;
};

struct request {
    PyObject *post;
    struct ah_letter *letter;
};

/* Let the handlers of signals run; `context` is the thread's state, which changes hands. */
static int pulse(void *context)
{
    PyThreadState **thread = context;
    int raised;

    PyEval_RestoreThread(*thread);
    raised = PyErr_CheckSignals();
    *thread = PyEval_SaveThread();
    return raised;
}

/* Nothing where a handler raised. */
static PyObject *told(struct ah_outcome outcome)
{
    if (outcome.code == AH_INTERRUPTED)
        return NULL;
    if (outcome.code == AH_UNDER_WAY)
        return PyLong_FromLong(AH_UNDER_WAY);
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
    message->peer = peer < 0 || peer > UINT32_MAX ? AH_ANYONE : (uint32_t)peer;
    message->tag = PyLong_AsUnsignedLongLong(args[4]);
    message->sends = sends;
    *limit = PyLong_AsLongLong(args[5]);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *send_or_receive(struct post *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    struct ah_outcome outcome;
    PyThreadState *thread;
    int64_t limit;

    if (ah_count(n, 6) != 0 || as_message(args, sends, &message, &limit) != 0)
        return NULL;
    if (ah_mail_try(self->mail, &message, &outcome))
        return told(outcome);
    thread = PyEval_SaveThread();
    outcome = ah_mail_do(self->mail, &message, limit, &(struct ah_ear){.pulse = pulse, .context = &thread});
    PyEval_RestoreThread(thread);
    return told(outcome);
}

static PyObject *send(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    return send_or_receive(self, args, n, 1);
}

static PyObject *recv(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    return send_or_receive(self, args, n, 0);
}

static void drop(PyObject *capsule)
{
    struct request *request = PyCapsule_GetPointer(capsule, REQUEST);

    const struct post *self;

    if (!request)
        return;
    self = (struct post *)request->post;
    /* A forked child has copies of its parent's requests, and nothing to say in its group. */
    if (self->process == getpid())
        ah_mail_drop(self->mail, request->letter);
    Py_DECREF(request->post);
    free(request);
}

static PyObject *post_either(struct post *self, PyObject *const *args, Py_ssize_t n, int sends)
{
    struct ah_message message;
    struct ah_outcome outcome;
    struct ah_letter *letter;
    struct request *request;
    PyThreadState *thread;
    PyObject *capsule;
    uint64_t key;
    int64_t limit;

    if (ah_count(n, 7) != 0 || as_message(args, sends, &message, &limit) != 0)
        return NULL;
    key = PyLong_AsUnsignedLongLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    request = malloc(sizeof *request);
    if (!request)
        return PyErr_NoMemory();
    thread = PyEval_SaveThread();
    outcome = ah_mail_post(self->mail, &message, limit, key, &letter);
    PyEval_RestoreThread(thread);
    if (!letter) {
        free(request);
        return told(outcome);
    }
    *request = (struct request){.post = (PyObject *)self, .letter = letter};
    Py_INCREF(request->post);
    capsule = PyCapsule_New(request, REQUEST, drop);
    if (!capsule) {
        ah_mail_drop(self->mail, letter);
        Py_DECREF(request->post);
        free(request);
    }
    return capsule;
}

static PyObject *post_send(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    return post_either(self, args, n, 1);
}

static PyObject *post_recv(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    return post_either(self, args, n, 0);
}

static struct ah_letter *letter_of(const struct post *self, PyObject *capsule)
{
    struct request *request = PyCapsule_GetPointer(capsule, REQUEST);

    if (request && request->post != (PyObject *)self) {
        PyErr_SetString(PyExc_ValueError, "a request of another Mail");
        return NULL;
    }
    return request ? request->letter : NULL;
}

static PyObject *wait(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_letter *letter;
    struct ah_outcome outcome;
    PyThreadState *thread;
    int64_t limit;

    if (ah_count(n, 2) != 0 || !(letter = letter_of(self, args[0])))
        return NULL;
    limit = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    thread = PyEval_SaveThread();
    outcome = ah_mail_wait(self->mail, letter, limit, &(struct ah_ear){.pulse = pulse, .context = &thread});
    PyEval_RestoreThread(thread);
    return told(outcome);
}

static PyObject *due(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_letter *letter;

    if (ah_count(n, 1) != 0 || !(letter = letter_of(self, args[0])))
        return NULL;
    ah_mail_due(self->mail, letter);
    Py_RETURN_NONE;
}

static PyObject *look(struct post *self, PyObject *const *args, Py_ssize_t n)
{
    struct ah_letter *letter;
    struct ah_outcome outcome;
    PyThreadState *thread;

    if (ah_count(n, 1) != 0 || !(letter = letter_of(self, args[0])))
        return NULL;
    thread = PyEval_SaveThread();
    outcome = ah_mail_look(self->mail, letter);
    PyEval_RestoreThread(thread);
    return told(outcome);
}

static PyObject *serve(struct post *self, PyObject *Py_UNUSED(none))
{
    uint64_t keys[MOST_KEYS];
    PyThreadState *thread;
    PyObject *list;
    size_t number;

    thread = PyEval_SaveThread();
    number = ah_mail_serve(self->mail, keys, MOST_KEYS);
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

static PyObject *stop(struct post *self, PyObject *Py_UNUSED(none))
{
    PyThreadState *thread = PyEval_SaveThread();

    ah_mail_stop(self->mail);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *ring(struct post *self, PyObject *Py_UNUSED(none))
{
    ah_ring_all(self->group);
    Py_RETURN_NONE;
}

static PyObject *unsent(struct post *self, PyObject *Py_UNUSED(none))
{
    PyThreadState *thread = PyEval_SaveThread();
    size_t number = ah_mail_unsent(self->mail);

    PyEval_RestoreThread(thread);
    return PyLong_FromSize_t(number);
}

static PyObject *odd(struct post *self, PyObject *Py_UNUSED(none))
{
    const struct ah_odd *found = ah_odd_of(self->group);

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
    struct post *self;
    PyObject *segment;

    if (keywords && PyDict_Size(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "Mail takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O:Mail", &segment))
        return NULL;
    shared = ah_as_segment(segment);
    if (!shared) {
        PyErr_SetString(PyExc_TypeError, "Mail takes a Segment");
        return NULL;
    }
    self = (struct post *)allocate(type, 0);
    if (!self)
        return NULL;
    self->segment = segment;
    Py_INCREF(segment);
    self->group = &shared->group;
    self->process = getpid();
    self->mail = ah_mail_open(self->group);
    if (!self->mail) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    shared->mail = self->mail;
    return (PyObject *)self;
}

static void unmake(PyObject *object)
{
    struct post *self = (struct post *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->mail) {
        ah_as_segment(self->segment)->mail = NULL;
        ah_mail_free(self->mail);
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
    FAST(due, "due(request): its timeout begins now, as in a wait without a limit"),
    FAST(look, "look(request) -> outcome, or -1 where it is still under way"),
    BARE(serve, "serve() -> keys of posted messages that are over; none once stopped"),
    BARE(stop, "stop(): end all that this rank has under way"),
    BARE(ring, "ring(): wake everyone who sleeps, to look whether the group is over"),
    BARE(unsent, "unsent() -> how many posted sends are under way"),
    BARE(odd, "odd() -> (source, target, tag, dtype, bytes, dtype, bytes) of the first message that did not fit, or None"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Mail(segment): one rank's messages to and from single ranks. One for each Segment."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Mail",
    .basicsize = sizeof(struct post),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_mail_type(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &SPEC, NULL);
}
