#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/py_window.h"

#include <sys/mman.h>

struct window {
    PyObject_HEAD
    struct ah_window window;
    size_t bytes; /* of all regions */
    PyObject *segment;
};

void ah_find_window(const struct ah_group *group, struct ah_part *part)
{
    for (const struct ah_window *each = group->windows; each; each = each->next) {
        const unsigned char *own = each->base + group->rank * each->stride;

        if (part->data >= own && part->data < own + each->stride && part->bytes <= (size_t)(own + each->stride - part->data)) {
            part->window = each;
            return;
        }
    }
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct ah_segment *segment;
    PyObject *given, *made;
    struct window *self;
    Py_ssize_t stride;
    int fd;

    if (!PyArg_ParseTuple(args, "Oin:Window", &given, &fd, &stride))
        return NULL;
    segment = ah_as_segment(given);
    if (!segment || stride <= 0) {
        PyErr_SetString(PyExc_TypeError, "Window(segment, fd, stride)");
        return NULL;
    }
    made = allocate(type, 0);
    if (!made)
        return NULL;
    self = (struct window *)made;
    self->bytes = (size_t)stride * segment->group.ranks;
    self->window.stride = (size_t)stride;
    self->window.base = mmap(NULL, self->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->window.base == MAP_FAILED) {
        self->window.base = NULL;
        Py_DECREF(made);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->segment = Py_NewRef(given);
    self->window.id = ++segment->group.windows_made;
    self->window.next = segment->group.windows;
    segment->group.windows = &self->window;
    return made;
}

static void unmake(PyObject *object)
{
    struct window *self = (struct window *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->segment) {
        const struct ah_window **link = &ah_as_segment(self->segment)->group.windows;

        while (*link && *link != &self->window)
            link = (const struct ah_window **)&(*link)->next;
        if (*link)
            *link = self->window.next;
        Py_DECREF(self->segment);
    }
    if (self->window.base)
        munmap(self->window.base, self->bytes);
    release(object);
    Py_DECREF(type);
}

/* Our own region, for a tensor to stand on. */
static int own(PyObject *object, Py_buffer *view, int flags)
{
    struct window *self = (struct window *)object;
    uint32_t rank = ah_as_segment(self->segment)->group.rank;

    return PyBuffer_FillInfo(view, object, self->window.base + rank * self->window.stride,
                             (Py_ssize_t)self->window.stride, 0, flags);
}

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_bf_getbuffer, own},
    {Py_tp_doc, "Window(segment, fd, stride): memory that all ranks of a group share; its buffer is our own region."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Window",
    .basicsize = sizeof(struct window),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_window_type(void)
{
    return PyType_FromSpec(&SPEC);
}
