/* The Python type allhands._core.Intake: what a hook on a parameter does in the usual case, which is to count a gradient
 * and to move it into its bucket. Backward has pushed everything else out of the caches by then, so that each line of
 * Python costs microseconds there. The books are the reducer's own lists; whatever is unusual goes to its `came`. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/grad_hook.h"

#include <stdlib.h>

#include "shm/tensor_list.h"
#include "shm/copy.h"
#include "python/torch_facts.h"

/* So many bytes take less time than letting go of the interpreter and getting it back, where others want it. */
#define SHORT_BYTES ((size_t)64 << 10)

enum book { COUNTS, LEFT, USED, NEEDED, BOOKS };

struct intake {
    PyObject_HEAD
    PyObject *way, *parameters, *came, *complete;
    PyObject *of;           /* tuple: the number of each parameter's bucket */
    PyObject *views;        /* tuple: where each gradient is to lie, None: where it comes; NULL where all stay, and none is looked at */
    struct ah_plain *likes; /* the shape and type that each is to have; no dtype: whatever comes */
    PyObject *end;          /* weak reference to what is called when backward is over; NULL outside of a pass */
    PyObject *books[BOOKS]; /* lists, one number for each parameter, LEFT one for each bucket */
    PyObject *grad, *requires_grad;
};

/* Whether the gradient can be moved as bytes to where a plain tensor is: it is plain, like that one, and nothing is derived from it
 * later. */
static int is_movable(struct intake *self, PyObject *gradient, const struct ah_plain *to, struct ah_plain *from)
{
    PyObject *derived;
    int plain;

    if (ah_look((struct ah_way *)self->way, gradient, from) != 0)
        return 0;
    if (from->dtype != to->dtype || from->part.bytes != to->part.bytes || from->dims != to->dims || from->dims > AH_BOARD_DIMS)
        return 0;
    for (uint32_t dim = 0; dim < from->dims; dim++) {
        if (from->shape[dim] != to->shape[dim])
            return 0;
    }
    derived = PyObject_GetAttr(gradient, self->requires_grad);
    plain = derived == Py_False;
    Py_XDECREF(derived);
    PyErr_Clear();
    return plain;
}

/* See to it that the gradient of a parameter lies where it is to lie: 1 if it does, 0 if it cannot be moved so, -1 with
 * an exception set. */
static int lay(struct intake *self, Py_ssize_t index, PyObject *gradient)
{
    PyObject *parameter = PyTuple_GetItem(self->parameters, index);
    PyObject *view = self->views ? PyTuple_GetItem(self->views, index) : Py_None;
    struct ah_plain from, to;
    PyThreadState *thread;
    int code;

    if (!parameter || !view)
        return -1;
    if (gradient == view || view == Py_None)
        return 1;
    if (gradient == Py_None || ah_look((struct ah_way *)self->way, view, &to) != 0 || !is_movable(self, gradient, &to, &from))
        return 0;
    Py_INCREF(parameter);
    Py_INCREF(view);
    thread = to.part.bytes > SHORT_BYTES ? PyEval_SaveThread() : NULL;
    ah_copy(to.part.data, from.part.data, to.part.bytes, 0);
    if (thread)
        PyEval_RestoreThread(thread);
    code = PyObject_SetAttr(parameter, self->grad, view);
    Py_DECREF(view);
    Py_DECREF(parameter);
    return code == 0 ? 1 : -1;
}

/* A number of a book; -1 with an exception set. */
static long look_up(PyObject *book, Py_ssize_t index)
{
    PyObject *number = PyList_GetItem(book, index);

    return number ? PyLong_AsLong(number) : -1;
}

static int enter(PyObject *book, Py_ssize_t index, long number)
{
    PyObject *made = PyLong_FromLong(number);

    return made ? PyList_SetItem(book, index, made) : -1;
}

/* Whether a pass is under way; an exception may have ended it. -1 with an exception set. */
static int in_pass(struct intake *self)
{
    PyObject *end = self->end ? PyObject_CallNoArgs(self->end) : NULL;
    int alive = end && end != Py_None;

    Py_XDECREF(end);
    return PyErr_Occurred() ? -1 : alive;
}

/* The usual case: 1 if it was one, 0 if not, -1 with an exception set. */
static int take(struct intake *self, Py_ssize_t index)
{
    PyObject *parameter, *gradient, *number;
    long count, needed, left;
    Py_ssize_t bucket;
    int code = in_pass(self);

    if (code != 1)
        return code;
    count = look_up(self->books[COUNTS], index) + 1;
    needed = look_up(self->books[NEEDED], index);
    number = PyTuple_GetItem(self->of, index);
    bucket = number ? PyLong_AsSsize_t(number) : -1;
    parameter = PyTuple_GetItem(self->parameters, index);
    if (PyErr_Occurred())
        return -1;
    if (count > needed || look_up(self->books[LEFT], bucket) <= 0)
        return PyErr_Occurred() ? -1 : 0;
    if (self->views) {
        if (!(gradient = PyObject_GetAttr(parameter, self->grad)))
            return -1;
        code = gradient == Py_None ? 0 : lay(self, index, gradient);
        Py_DECREF(gradient);
    }
    /* Another thread may have ended the pass while this one let go of the interpreter. */
    if (code != 1 || !self->end)
        return code;
    if (enter(self->books[COUNTS], index, count) != 0 || enter(self->books[USED], index, 1) != 0)
        return -1;
    if (count < needed)
        return 1;
    left = look_up(self->books[LEFT], bucket) - 1;
    if (PyErr_Occurred() || enter(self->books[LEFT], bucket, left) != 0)
        return -1;
    if (left == 0) {
        PyObject *done = PyObject_CallNoArgs(self->complete);

        Py_XDECREF(done);
        return done ? 1 : -1;
    }
    return 1;
}

static PyObject *came(PyObject *object, PyObject *const *given, Py_ssize_t number)
{
    struct intake *self = (struct intake *)object;
    Py_ssize_t index = number == 2 ? PyLong_AsSsize_t(given[0]) : -1;
    int code;

    if (index < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "came(index, parameter)");
        return NULL;
    }
    code = take(self, index);
    if (code < 0)
        return NULL;
    if (code == 0)
        return PyObject_CallFunctionObjArgs(self->came, given[0], NULL);
    Py_RETURN_NONE;
}

static void forget(struct intake *self)
{
    Py_CLEAR(self->end);
    for (int book = 0; book < BOOKS; book++)
        Py_CLEAR(self->books[book]);
}

static PyObject *begin(PyObject *object, PyObject *args)
{
    struct intake *self = (struct intake *)object;
    PyObject *end, *given[BOOKS];

    if (!PyArg_ParseTuple(args, "OO!O!O!O!:begin", &end, &PyList_Type, &given[COUNTS], &PyList_Type, &given[LEFT],
                          &PyList_Type, &given[USED], &PyList_Type, &given[NEEDED]))
        return NULL;
    forget(self);
    self->end = Py_NewRef(end);
    for (int book = 0; book < BOOKS; book++)
        self->books[book] = Py_NewRef(given[book]);
    Py_RETURN_NONE;
}

static PyObject *rest(PyObject *object, PyObject *Py_UNUSED(none))
{
    forget((struct intake *)object);
    Py_RETURN_NONE;
}

static PyObject *arrange(PyObject *object, PyObject *args)
{
    struct intake *self = (struct intake *)object;
    Py_ssize_t parameters = PyTuple_Size(self->parameters);
    PyObject *of, *views, *likes;

    if (!PyArg_ParseTuple(args, "O!OO!:arrange", &PyTuple_Type, &of, &views, &PyTuple_Type, &likes))
        return NULL;
    if (PyTuple_Size(of) != parameters || PyTuple_Size(likes) != parameters ||
        (views != Py_None && (!PyTuple_Check(views) || PyTuple_Size(views) != parameters))) {
        PyErr_SetString(PyExc_ValueError, "a bucket, a view and a tensor for each parameter");
        return NULL;
    }
    forget(self);
    Py_XDECREF(self->of);
    Py_XDECREF(self->views);
    self->of = Py_NewRef(of);
    self->views = views == Py_None ? NULL : Py_NewRef(views);
    for (Py_ssize_t index = 0; index < parameters; index++) {
        if (ah_look((struct ah_way *)self->way, PyTuple_GetItem(likes, index), &self->likes[index]) != 0)
            self->likes[index].dtype = 0;
    }
    Py_RETURN_NONE;
}

/* Whether each parameter requires a gradient as `known` says. */
static PyObject *trains(PyObject *object, PyObject *known)
{
    struct intake *self = (struct intake *)object;
    Py_ssize_t parameters = PyTuple_Size(self->parameters);
    int alike = PyList_Check(known) && PyList_Size(known) == parameters;

    for (Py_ssize_t index = 0; alike && index < parameters; index++) {
        PyObject *now = PyObject_GetAttr(PyTuple_GetItem(self->parameters, index), self->requires_grad);

        if (!now)
            return NULL;
        alike = now == PyList_GetItem(known, index);
        Py_DECREF(now);
    }
    return PyBool_FromLong(alike);
}

static PyObject *lie(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct intake *self = (struct intake *)object;
    Py_ssize_t parameters = PyTuple_Size(self->parameters);

    for (Py_ssize_t index = 0; index < parameters; index++) {
        PyObject *gradient = PyObject_GetAttr(PyTuple_GetItem(self->parameters, index), self->grad);
        int code = gradient ? lay(self, index, gradient) : -1;

        Py_XDECREF(gradient);
        if (code < 0)
            return NULL;
        if (code == 0)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Whether the gradient of a parameter can be reduced where it lies: it is plain and as it is to be, and used. */
static int can_stay(struct intake *self, Py_ssize_t index, PyObject *gradient, struct ah_part *part)
{
    PyObject *parameter = PyTuple_GetItem(self->parameters, index);
    PyObject *trained = gradient == Py_None ? NULL : PyObject_GetAttr(parameter, self->requires_grad);
    struct ah_plain from;
    int plain = trained == Py_True && self->likes[index].dtype != 0 && is_movable(self, gradient, &self->likes[index], &from);

    Py_XDECREF(trained);
    PyErr_Clear();
    if (plain)
        *part = from.part;
    return plain;
}

static PyObject *gather(PyObject *object, PyObject *order)
{
    struct intake *self = (struct intake *)object;
    Py_ssize_t number = PyTuple_Check(order) ? PyTuple_Size(order) : 0;
    struct ah_bundle bundle = {0};
    PyObject *found = NULL;
    int plain = number > 0;

    if (plain && (ah_bundle_make(&bundle, (size_t)number) != 0 || !(found = PyList_New(number)))) {
        ah_bundle_free(&bundle);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t place = 0; plain && place < number; place++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GetItem(order, place));
        PyObject *parameter = PyErr_Occurred() ? NULL : PyTuple_GetItem(self->parameters, index);
        PyObject *gradient = parameter ? PyObject_GetAttr(parameter, self->grad) : NULL;

        if (!gradient) {
            Py_DECREF(found);
            ah_bundle_free(&bundle);
            return NULL;
        }
        plain = can_stay(self, index, gradient, &bundle.parts[place]);
        PyList_SetItem(found, place, gradient);
    }
    plain = plain && ah_bundle_is_apart(&bundle);
    ah_bundle_free(&bundle);
    if (plain)
        return found;
    Py_XDECREF(found);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *way, *parameters, *came, *complete, *made;
    struct intake *self;

    if (!PyArg_ParseTuple(args, "OO!OO:Intake", &way, &PyTuple_Type, &parameters, &came, &complete))
        return NULL;
    if (!ah_as_way(way)) {
        PyErr_SetString(PyExc_TypeError, "Intake(way, parameters, came, complete)");
        return NULL;
    }
    if (!(made = allocate(type, 0)))
        return NULL;
    self = (struct intake *)made;
    self->way = Py_NewRef(way);
    self->parameters = Py_NewRef(parameters);
    self->came = Py_NewRef(came);
    self->complete = Py_NewRef(complete);
    self->of = PyTuple_New(0);
    self->views = PyTuple_New(0);
    self->likes = calloc((size_t)PyTuple_Size(parameters) + 1, sizeof *self->likes);
    self->grad = PyUnicode_InternFromString("grad");
    self->requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!self->of || !self->views || !self->likes || !self->grad || !self->requires_grad) {
        Py_DECREF(made);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return made;
}

static void unmake(PyObject *object)
{
    struct intake *self = (struct intake *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    forget(self);
    Py_XDECREF(self->way);
    Py_XDECREF(self->parameters);
    Py_XDECREF(self->came);
    Py_XDECREF(self->complete);
    Py_XDECREF(self->of);
    Py_XDECREF(self->views);
    free(self->likes);
    Py_XDECREF(self->grad);
    Py_XDECREF(self->requires_grad);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"came", (PyCFunction)(void (*)(void))came, METH_FASTCALL, "came($self, index, parameter, /)\n--\n\nNote that a gradient is there."},
    {"begin", begin, METH_VARARGS, "begin($self, end, counts, left, used, needed, /)\n--\n\nTake part in a pass."},
    {"rest", rest, METH_NOARGS, "rest($self, /)\n--\n\nLeave everything to Python."},
    {"arrange", arrange, METH_VARARGS, "arrange($self, of, views, likes, /)\n--\n\nSay where gradients are to lie."},
    {"lie", lie, METH_NOARGS, "lie($self, /)\n--\n\nMove what does not lie where it is to lie; tell whether all does now."},
    {"trains", trains, METH_O, "trains($self, known, /)\n--\n\nTell whether those require gradients that did."},
    {"gather", gather, METH_O, "gather($self, order, /)\n--\n\nReturn gradients that can be reduced where they lie, or None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "Intake(way, parameters, came, complete): takes gradients as they come, where that is simple."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Intake",
    .basicsize = sizeof(struct intake),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_intake_type(void)
{
    return PyType_FromSpec(&SPEC);
}
