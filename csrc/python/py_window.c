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

        if (part->data >= own && part->data < own + each->stride &&
            part->bytes <= (size_t)(own + each->stride - part->data)) {
            part->window = each;
            return;
        }
    }
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    struct ah_segment *segment;
    struct window *self;
    PyObject *given;
    Py_ssize_t stride;
    int fd;

    if (!PyArg_ParseTuple(args, "Oin:Window", &given, &fd, &stride))
        return NULL;
    segment = ah_as_segment(given);
    if (!segment || stride <= 0) {
        PyErr_SetString(PyExc_TypeError, "Window(segment, fd, stride)");
        return NULL;
    }
    self = (struct window *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->bytes = (size_t)stride * segment->group.ranks;
    self->window.stride = (size_t)stride;
    self->window.base = mmap(NULL, self->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (self->window.base == MAP_FAILED) {
        self->window.base = NULL;
        Py_DECREF((PyObject *)self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->segment = Py_NewRef(given);
    self->window.id = ++segment->group.windows_made;
    self->window.next = segment->group.windows;
    segment->group.windows = &self->window;
    return (PyObject *)self;
}

static void unmake(struct window *self)
{
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
    ah_object_free(self);
}

/* This rank's region, for a tensor. */
static int get_buffer(PyObject *object, Py_buffer *view, int flags)
{
    struct window *self = (struct window *)object;
    uint32_t rank = ah_as_segment(self->segment)->group.rank;

    return PyBuffer_FillInfo(view, object, self->window.base + rank * self->window.stride,
                             (Py_ssize_t)self->window.stride, 0, flags);
}

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_bf_getbuffer, get_buffer},
    {Py_tp_doc,
     "Window(segment, fd, stride): memory that all ranks of a group share; its buffer is the region of this rank."},
    {0, NULL},
};

PyType_Spec ah_window_spec = {
    .name = "allhands._core.Window",
    .basicsize = sizeof(struct window),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};
