/* The Python type allhands._core.GradHook: the hook of DistributedDataParallel on each parameter, in the usual case:
 * count the gradient and move it into its bucket. Backward has evicted everything else from the caches by then, so a
 * line of Python costs microseconds there. The lists belong to the reducer; unusual cases are passed to its `slow`. */
#include "python/object.h"

#include <stdlib.h>

#include "python/torch_facts.h"
#include "shm/copy.h"
#include "shm/tensor_list.h"

/* Copying this much takes less time than releasing the GIL and getting it back from another thread. */
#define SHORT_BYTES ((size_t)64 << 10)

enum counter_list { COUNTS, LEFT, USED, NEEDED, LISTS };

struct grad_hook {
    PyObject_HEAD
    PyObject *args; /* of the constructor: owns the four objects below */
    struct ah_torch_facts *facts;
    PyObject *parameters, *slow, *complete;
    PyObject *buckets; /* tuple: the number of each parameter's bucket */
    PyObject *views;   /* tuple: the bucket's view for each gradient, None: it stays; NULL: all stay */
    struct ah_tensor *templates; /* shape and dtype of each gradient in its bucket; dtype 0: none is required */
    PyObject *end;               /* weak reference to the callback at the end of backward; NULL outside of a pass */
    PyObject *lists[LISTS];      /* of the reducer: a number for each parameter, in LEFT for each bucket */
    PyObject *grad, *requires_grad;
};

/* Whether a gradient can be copied as bytes to a plain tensor: it is plain, has the same shape and dtype, and requires
 * no gradient itself. */
static int is_movable(struct grad_hook *self, PyObject *gradient, const struct ah_tensor *to, struct ah_tensor *from)
{
    PyObject *derived;
    int plain;

    if (ah_describe_tensor(self->facts, gradient, from) != 0)
        return 0;
    if (from->dtype != to->dtype || from->part.bytes != to->part.bytes || from->dims != to->dims ||
        from->dims > AH_ENTRY_DIMS)
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

/* Move the gradient of a parameter into its bucket: 1 if it is there, 0 if it is not movable, -1 with an exception set.
 * */
static int move_gradient(struct grad_hook *self, Py_ssize_t index, PyObject *gradient)
{
    PyObject *parameter = PyTuple_GetItem(self->parameters, index);
    PyObject *view = self->views ? PyTuple_GetItem(self->views, index) : Py_None;
    struct ah_tensor from, to;
    PyThreadState *thread;
    int code;

    if (!parameter || !view)
        return -1;
    if (gradient == view || view == Py_None)
        return 1;
    if (gradient == Py_None || ah_describe_tensor(self->facts, view, &to) != 0 ||
        !is_movable(self, gradient, &to, &from))
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

/* Item of a list of numbers; -1 with an exception set. */
static long get_number(PyObject *list, Py_ssize_t index)
{
    PyObject *number = PyList_GetItem(list, index);

    return number ? PyLong_AsLong(number) : -1;
}

static int set_number(PyObject *list, Py_ssize_t index, long number)
{
    PyObject *made = PyLong_FromLong(number);

    return made ? PyList_SetItem(list, index, made) : -1;
}

/* Whether a backward pass is running; an exception may have ended it. -1 with an exception set. */
static int in_pass(struct grad_hook *self)
{
    PyObject *end = self->end ? PyObject_CallNoArgs(self->end) : NULL;
    int alive = end && end != Py_None;

    Py_XDECREF(end);
    return PyErr_Occurred() ? -1 : alive;
}

/* Count and move a gradient: 1 if done, 0 if it is an unusual case, -1 with an exception set. */
static int count_gradient(struct grad_hook *self, Py_ssize_t index)
{
    PyObject *parameter, *gradient, *number;
    long count, needed, left;
    Py_ssize_t bucket;
    int code = in_pass(self);

    if (code != 1)
        return code;
    count = get_number(self->lists[COUNTS], index) + 1;
    needed = get_number(self->lists[NEEDED], index);
    number = PyTuple_GetItem(self->buckets, index);
    bucket = number ? PyLong_AsSsize_t(number) : -1;
    parameter = PyTuple_GetItem(self->parameters, index);
    if (PyErr_Occurred())
        return -1;
    if (count > needed || get_number(self->lists[LEFT], bucket) <= 0)
        return PyErr_Occurred() ? -1 : 0;
    if (self->views) {
        if (!(gradient = PyObject_GetAttr(parameter, self->grad)))
            return -1;
        code = gradient == Py_None ? 0 : move_gradient(self, index, gradient);
        Py_DECREF(gradient);
    }
    /* Another thread may have ended the pass while the GIL was released. */
    if (code != 1 || !self->end)
        return code;
    if (set_number(self->lists[COUNTS], index, count) != 0 || set_number(self->lists[USED], index, 1) != 0)
        return -1;
    if (count < needed)
        return 1;
    left = get_number(self->lists[LEFT], bucket) - 1;
    if (PyErr_Occurred() || set_number(self->lists[LEFT], bucket, left) != 0)
        return -1;
    if (left == 0) {
        PyObject *done = PyObject_CallNoArgs(self->complete);

        Py_XDECREF(done);
        return done ? 1 : -1;
    }
    return 1;
}

static PyObject *on_gradient(struct grad_hook *self, PyObject *const *given, Py_ssize_t number)
{
    Py_ssize_t index = number == 2 ? PyLong_AsSsize_t(given[0]) : -1;
    int code;

    if (index < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "on_gradient(index, parameter)");
        return NULL;
    }
    code = count_gradient(self, index);
    if (code < 0)
        return NULL;
    if (code == 0)
        return PyObject_CallFunctionObjArgs(self->slow, given[0], NULL);
    Py_RETURN_NONE;
}

static void clear_pass(struct grad_hook *self)
{
    Py_CLEAR(self->end);
    for (int list = 0; list < LISTS; list++)
        Py_CLEAR(self->lists[list]);
}

static PyObject *begin_pass(struct grad_hook *self, PyObject *args)
{
    PyObject *end, *given[LISTS];

    if (!PyArg_ParseTuple(args, "OO!O!O!O!:begin_pass", &end, &PyList_Type, &given[COUNTS], &PyList_Type, &given[LEFT],
                          &PyList_Type, &given[USED], &PyList_Type, &given[NEEDED]))
        return NULL;
    clear_pass(self);
    self->end = Py_NewRef(end);
    for (int list = 0; list < LISTS; list++)
        self->lists[list] = Py_NewRef(given[list]);
    Py_RETURN_NONE;
}

static PyObject *disable(struct grad_hook *self, PyObject *Py_UNUSED(none))
{
    clear_pass(self);
    Py_RETURN_NONE;
}

static PyObject *set_places(struct grad_hook *self, PyObject *args)
{
    Py_ssize_t parameters = PyTuple_Size(self->parameters);
    PyObject *of, *views, *templates;

    if (!PyArg_ParseTuple(args, "O!OO!:set_places", &PyTuple_Type, &of, &views, &PyTuple_Type, &templates))
        return NULL;
    if (PyTuple_Size(of) != parameters || PyTuple_Size(templates) != parameters ||
        (views != Py_None && (!PyTuple_Check(views) || PyTuple_Size(views) != parameters))) {
        PyErr_SetString(PyExc_ValueError, "a bucket, a view and a tensor for each parameter");
        return NULL;
    }
    clear_pass(self);
    Py_XDECREF(self->buckets);
    Py_XDECREF(self->views);
    self->buckets = Py_NewRef(of);
    self->views = views == Py_None ? NULL : Py_NewRef(views);
    for (Py_ssize_t index = 0; index < parameters; index++) {
        if (ah_describe_tensor(self->facts, PyTuple_GetItem(templates, index), &self->templates[index]) != 0)
            self->templates[index].dtype = 0;
    }
    Py_RETURN_NONE;
}

/* Whether the gradient of a parameter can be reduced in place: it is plain, of the required shape and dtype, and used.
 * */
static int can_stay(struct grad_hook *self, Py_ssize_t index, PyObject *gradient, struct ah_part *part)
{
    PyObject *parameter = PyTuple_GetItem(self->parameters, index);
    PyObject *trained = gradient == Py_None ? NULL : PyObject_GetAttr(parameter, self->requires_grad);
    struct ah_tensor from;
    int plain = trained == Py_True && self->templates[index].dtype != 0 &&
                is_movable(self, gradient, &self->templates[index], &from);

    Py_XDECREF(trained);
    PyErr_Clear();
    if (plain)
        *part = from.part;
    return plain;
}

static PyObject *gather(struct grad_hook *self, PyObject *order)
{
    Py_ssize_t number = PyTuple_Check(order) ? PyTuple_Size(order) : 0;
    struct ah_tensor_list tensors = {0};
    PyObject *found = NULL;
    int plain = number > 0;

    if (plain && (ah_tensor_list_alloc(&tensors, (size_t)number) != 0 || !(found = PyList_New(number)))) {
        ah_tensor_list_free(&tensors);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t place = 0; plain && place < number; place++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GetItem(order, place));
        PyObject *parameter = PyErr_Occurred() ? NULL : PyTuple_GetItem(self->parameters, index);
        PyObject *gradient = parameter ? PyObject_GetAttr(parameter, self->grad) : NULL;

        if (!gradient) {
            Py_DECREF(found);
            ah_tensor_list_free(&tensors);
            return NULL;
        }
        plain = can_stay(self, index, gradient, &tensors.parts[place]);
        PyList_SetItem(found, place, gradient);
    }
    plain = plain && ah_tensor_list_is_disjoint(&tensors);
    ah_tensor_list_free(&tensors);
    if (plain)
        return found;
    Py_XDECREF(found);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *facts, *parameters, *slow, *complete;
    struct grad_hook *self;

    if (!PyArg_ParseTuple(args, "OO!OO:GradHook", &facts, &PyTuple_Type, &parameters, &slow, &complete))
        return NULL;
    if (!ah_as_torch_facts(facts)) {
        PyErr_SetString(PyExc_TypeError, "GradHook(facts, parameters, slow, complete)");
        return NULL;
    }
    self = (struct grad_hook *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->args = Py_NewRef(args);
    self->facts = (struct ah_torch_facts *)facts;
    self->parameters = parameters;
    self->slow = slow;
    self->complete = complete;
    self->buckets = PyTuple_New(0);
    self->views = PyTuple_New(0);
    self->templates = calloc((size_t)PyTuple_Size(parameters) + 1, sizeof *self->templates);
    self->grad = PyUnicode_InternFromString("grad");
    self->requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!self->buckets || !self->views || !self->templates || !self->grad || !self->requires_grad) {
        Py_DECREF((PyObject *)self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void unmake(struct grad_hook *self)
{
    clear_pass(self);
    Py_XDECREF(self->args);
    Py_XDECREF(self->buckets);
    Py_XDECREF(self->views);
    free(self->templates);
    Py_XDECREF(self->grad);
    Py_XDECREF(self->requires_grad);
    ah_object_free(self);
}

static PyMethodDef METHODS[] = {
    AH_METHOD(on_gradient, METH_FASTCALL,
              "on_gradient(index, parameter): a hook; the gradient of a parameter has arrived"),
    AH_METHOD(begin_pass, METH_VARARGS,
              "begin_pass(end, counts, left, used, needed): count the gradients of a backward pass"),
    AH_METHOD(disable, METH_NOARGS, "disable(): leave all gradients to Python until the next pass"),
    AH_METHOD(set_places, METH_VARARGS, "set_places(of, views, templates): where each gradient is moved to"),
    AH_METHOD(gather, METH_O, "gather(order) -> gradients that can be reduced in place, or None"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_tp_doc, "GradHook(facts, parameters, slow, complete): counts gradients and moves them into their buckets."},
    {0, NULL},
};

PyType_Spec ah_grad_hook_spec = {
    .name = "allhands._core.GradHook",
    .basicsize = sizeof(struct grad_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};
