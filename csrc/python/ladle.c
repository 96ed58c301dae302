#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/ladle.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "python/py_segment.h"
#include "shm/pool.h"
#include "python/torch_facts.h"

struct ladle {
    PyObject_HEAD
    struct ah_pool pool;
    struct ah_dlpack_managed *shapes; /* of each result but the last, as a tensor; attached to the view, which is their context */
    size_t number;                    /* of them */
    PyObject *way, *segment, *grad;
};

void ah_find_pool(const struct ah_group *group, struct ah_bundle *bundle)
{
    for (struct ah_pool *each = group->pools; each; each = each->next) {
        if (ah_pool_fits(each, bundle)) {
            bundle->pool = each;
            return;
        }
    }
}

static void release(struct ah_dlpack_managed *shape)
{
    ah_pool_release(shape->context);
}

/* How results look that are like some tensors of one type, each of which fills its memory: an array, and behind it their sizes and strides.
 * NULL with an exception set. */
static struct ah_dlpack_managed *describe(const struct ah_dlpack *dlpack, PyObject *likes, size_t *sizes)
{
    size_t number = (size_t)PyTuple_Size(likes), dims = 0, element = 0;
    struct ah_dlpack_managed *shapes;
    struct ah_dlpack_tensor found;
    int64_t *at;

    for (size_t index = 0; index < number; index++) {
        if (dlpack->describe(PyTuple_GetItem(likes, (Py_ssize_t)index), &found) != 0)
            return NULL;
        dims += (size_t)found.dims;
    }
    if (!(shapes = calloc(1, number * sizeof *shapes + 2 * dims * sizeof *at))) {
        PyErr_NoMemory();
        return NULL;
    }
    at = (int64_t *)(void *)(shapes + number);
    for (size_t index = 0; index < number; index++) {
        size_t elements = 1;

        if (dlpack->describe(PyTuple_GetItem(likes, (Py_ssize_t)index), &found) != 0) {
            free(shapes);
            return NULL;
        }
        for (int32_t dim = 0; dim < found.dims; dim++) {
            elements *= (size_t)found.shape[dim];
            at[dim] = found.shape[dim];
            at[found.dims + dim] = found.strides[dim];
        }
        found.data = NULL;
        found.byte_offset = 0;
        found.shape = at;
        found.strides = at + found.dims;
        at += 2 * found.dims;
        element = found.bits / 8;
        sizes[index] = elements * element;
        shapes[index] = (struct ah_dlpack_managed){.major = AH_DLPACK_MAJOR, .release = release, .tensor = found};
    }
    sizes[number] = element;
    return shapes;
}

static PyObject *cannot(int code)
{
    errno = code;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *way, *given, *likes, *made;
    struct ah_segment *segment;
    struct ladle *self;
    size_t *sizes;
    int fd, code;

    if (!PyArg_ParseTuple(args, "OOiO!:Pool", &way, &given, &fd, &PyTuple_Type, &likes))
        return NULL;
    segment = ah_as_segment(given);
    if (!segment || !ah_as_way(way) || PyTuple_Size(likes) == 0) {
        PyErr_SetString(PyExc_TypeError, "Pool(way, segment, fd, likes)");
        return NULL;
    }
    if (!((struct ah_way *)way)->dlpack || !((struct ah_way *)way)->dlpack->wrap)
        return cannot(ENOSYS);
    if (!(made = allocate(type, 0)))
        return NULL;
    self = (struct ladle *)made;
    self->pool.pages = -1;
    self->number = (size_t)PyTuple_Size(likes);
    self->grad = PyUnicode_InternFromString("grad");
    if (!(sizes = calloc(self->number + 1, sizeof *sizes)) || !self->grad ||
        !(self->shapes = describe(((struct ah_way *)way)->dlpack, likes, sizes))) {
        free(sizes);
        Py_DECREF(made);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    code = ah_pool_make(&self->pool, fd, sizes, self->number + 1, segment->group.rank, segment->group.ranks);
    free(sizes);
    if (code != 0) {
        free(self->shapes);
        Py_DECREF(made);
        return cannot(code);
    }
    self->pool.view->attached = self->shapes;
    for (size_t index = 0; index < self->number; index++) {
        self->shapes[index].context = self->pool.view;
        self->shapes[index].tensor.data = ah_pool_result(&self->pool, index);
    }
    self->way = Py_NewRef(way);
    self->segment = Py_NewRef(given);
    self->pool.next = segment->group.pools;
    segment->group.pools = &self->pool;
    return made;
}

static void empty(struct ladle *self)
{
    if (self->segment) {
        struct ah_pool **link = &ah_as_segment(self->segment)->group.pools;

        while (*link && *link != &self->pool)
            link = &(*link)->next;
        if (*link)
            *link = self->pool.next;
        Py_CLEAR(self->segment);
    }
    ah_pool_free(&self->pool);
}

static void unmake(PyObject *object)
{
    struct ladle *self = (struct ladle *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);

    empty(self);
    Py_XDECREF(self->way);
    Py_XDECREF(self->grad);
    let_go(object);
    Py_DECREF(type);
}

static PyObject *bytes_for(PyObject *Py_UNUSED(type), PyObject *args)
{
    PyObject *given;
    unsigned int ranks;
    size_t bytes, *sizes;
    Py_ssize_t number;

    if (!PyArg_ParseTuple(args, "O!I:bytes_for", &PyTuple_Type, &given, &ranks))
        return NULL;
    number = PyTuple_Size(given);
    if (!(sizes = calloc((size_t)number + 1, sizeof *sizes)))
        return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < number; index++)
        sizes[index] = PyLong_AsSize_t(PyTuple_GetItem(given, index));
    bytes = ah_pool_bytes(sizes, (size_t)number, ranks);
    free(sizes);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(bytes);
}

static PyObject *close_pool(PyObject *object, PyObject *Py_UNUSED(none))
{
    empty((struct ladle *)object);
    Py_RETURN_NONE;
}

static PyObject *is_free(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ladle *self = (struct ladle *)object;

    return PyBool_FromLong(self->pool.view && ah_pool_is_free(&self->pool));
}

static PyObject *is_clean(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ladle *self = (struct ladle *)object;
    PyThreadState *thread = PyEval_SaveThread();
    int clean = self->pool.view && ah_pool_is_free(&self->pool) && ah_pool_is_clean(&self->pool) == 1;

    PyEval_RestoreThread(thread);
    return PyBool_FromLong(clean);
}

static PyObject *offer(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ladle *self = (struct ladle *)object;

    self->pool.filled = 0;
    self->pool.offered = 1;
    Py_RETURN_NONE;
}

static PyObject *give(PyObject *object, PyObject *parameters)
{
    struct ladle *self = (struct ladle *)object;
    int filled = self->pool.filled && self->pool.view;

    if (!PyTuple_Check(parameters) || PyTuple_Size(parameters) != (Py_ssize_t)self->number) {
        PyErr_SetString(PyExc_TypeError, "a tuple of as many parameters as there are results");
        return NULL;
    }
    self->pool.filled = self->pool.offered = 0;
    for (size_t index = 0; filled && index < self->number; index++) {
        void *tensor = NULL;
        int code;

        /* Where torch makes no tensor of it, it is held for ever, and so never written again. */
        ah_pool_hold(self->pool.view);
        if (((struct ah_way *)self->way)->dlpack->wrap(&self->shapes[index], &tensor) != 0)
            return NULL;
        code = PyObject_SetAttr(PyTuple_GetItem(parameters, (Py_ssize_t)index), self->grad, tensor);
        Py_DECREF((PyObject *)tensor);
        if (code != 0)
            return NULL;
    }
    return PyBool_FromLong(filled);
}

/* Our cell, for a tensor to stand on. */
static int cell(PyObject *object, Py_buffer *view, int flags)
{
    struct ladle *self = (struct ladle *)object;

    return PyBuffer_FillInfo(view, object, self->pool.cell, (Py_ssize_t)sizeof self->pool.cell, 0, flags);
}

static PyMethodDef METHODS[] = {
    {"bytes_for", bytes_for, METH_VARARGS | METH_STATIC,
     "bytes_for(sizes, ranks, /)\n--\n\nReturn how much shared memory results of these sizes need, the last of which is that of the cell."},
    {"is_free", is_free, METH_NOARGS, "is_free($self, /)\n--\n\nTell whether nobody here has a result."},
    {"is_clean", is_clean, METH_NOARGS, "is_clean($self, /)\n--\n\nTell whether it is free and nobody here has written to a result; forget what was."},
    {"offer", offer, METH_NOARGS, "offer($self, /)\n--\n\nLet the results of the next call come here, if every rank does."},
    {"give", give, METH_O, "give($self, parameters, /)\n--\n\nMake the results gradients, where they came here; tell whether they did."},
    {"close", close_pool, METH_NOARGS, "close($self, /)\n--\n\nLet go of the memory; results that somebody has stay as they are."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_bf_getbuffer, cell},
    {Py_tp_doc, "Pool(way, segment, fd, likes): where results are once for all ranks; its buffer is our own cell."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Pool",
    .basicsize = sizeof(struct ladle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_ladle_type(void)
{
    return PyType_FromSpec(&SPEC);
}
