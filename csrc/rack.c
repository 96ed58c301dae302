#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rack.h"

#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "shelf.h"
#include "window.h"

/* So many bytes take less time than letting go of the interpreter and getting it back, where others want it. */
#define SHORT_BYTES ((size_t)64 << 10)

/* For how long looking at what the other rank does is worth more than to wait for it as ranks always do. */
#define LOOK_NS 500000

struct extent {
    const unsigned char *from, *to;
};

struct ah_rack {
    PyObject_HEAD
    struct ah_shelf shelf;
    struct ah_group *group;
    PyObject *window;
    PyObject *hooks;         /* tuple: for each item a dict of all hooks on its parameter, one of which is ours */
    PyObject **kept;         /* the tensor of each item that was put there in this round */
    struct extent *extents;  /* their memory, in order */
    size_t there;            /* how many */
    unsigned char *left_out; /* for each item: it is never put there */
};

/* Put the memory of a tensor in its place among the others; -1 where it shares some with one of them. */
static int note(struct ah_rack *rack, const struct ah_part *part)
{
    const unsigned char *from = part->data, *to = part->data + part->bytes;
    size_t low = 0, high = rack->there;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (rack->extents[middle].to <= from)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < rack->there && rack->extents[low].from < to)
        return -1;
    memmove(rack->extents + low + 1, rack->extents + low, (rack->there - low) * sizeof *rack->extents);
    rack->extents[low] = (struct extent){from, to};
    rack->there++;
    return 0;
}

int ah_rack_takes(const struct ah_rack *rack, size_t index)
{
    /* A hook of the user's would find the average on one rank and not on the other. */
    return index < rack->shelf.values && !rack->left_out[index] && !rack->kept[index] &&
           PyDict_Size(PyTuple_GetItem(rack->hooks, (Py_ssize_t)index)) == 1;
}

void ah_rack_put(struct ah_rack *rack, size_t index, PyObject *gradient, const struct ah_plain *plain)
{
    PyThreadState *thread;

    if (plain->part.bytes == 0 || plain->part.bytes != ah_shelf_size(&rack->shelf, index) ||
        !ah_reducible(plain->dtype, AH_AVG) || note(rack, &plain->part) != 0)
        return;
    rack->kept[index] = Py_NewRef(gradient);
    Py_INCREF((PyObject *)rack);
    thread = plain->part.bytes > SHORT_BYTES ? PyEval_SaveThread() : NULL;
    ah_shelf_put(&rack->shelf, index, plain->part.data, plain->dtype);
    if (thread)
        PyEval_RestoreThread(thread);
    Py_DECREF((PyObject *)rack);
}

/* Take what the other rank has averaged as long as it goes on to, unless it needs our core for that; without the interpreter. */
static void settle_all(struct ah_rack *rack)
{
    size_t waiting = ah_shelf_settle(&rack->shelf), before = waiting;
    int64_t heard = ah_clock_ns();

    while (waiting > 0 && rack->group->spins > 0 && ah_ended(rack->group) == AH_OK) {
        int64_t now = ah_clock_ns();

        if (waiting != before)
            heard = now;
        if (now - heard >= LOOK_NS)
            return;
        ah_relax();
        before = waiting;
        waiting = ah_shelf_settle(&rack->shelf);
    }
}

static PyObject *settle(PyObject *object, PyObject *Py_UNUSED(none))
{
    PyThreadState *thread = PyEval_SaveThread();

    settle_all((struct ah_rack *)object);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static void let_go(struct ah_rack *rack)
{
    for (size_t index = 0; rack->kept && index < rack->shelf.values; index++)
        Py_CLEAR(rack->kept[index]);
    rack->there = 0;
}

static PyObject *end(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ah_rack *rack = (struct ah_rack *)object;
    size_t number, *left = malloc((rack->shelf.values + 1) * sizeof *left);
    PyThreadState *thread;
    PyObject *found;

    if (!left)
        return PyErr_NoMemory();
    thread = PyEval_SaveThread();
    number = ah_shelf_end(&rack->shelf, left);
    PyEval_RestoreThread(thread);
    let_go(rack);
    found = PyTuple_New((Py_ssize_t)number);
    for (size_t each = 0; found && each < number; each++) {
        PyObject *index = PyLong_FromSize_t(left[each]);

        if (!index || PyTuple_SetItem(found, (Py_ssize_t)each, index) != 0)
            Py_CLEAR(found);
    }
    free(left);
    return found;
}

static PyObject *has(PyObject *object, PyObject *given)
{
    struct ah_rack *rack = (struct ah_rack *)object;
    size_t index = PyLong_AsSize_t(given);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(index < rack->shelf.values && rack->kept[index]);
}

static PyObject *leave_out(PyObject *object, PyObject *given)
{
    struct ah_rack *rack = (struct ah_rack *)object;
    size_t index = PyLong_AsSize_t(given);

    if (PyErr_Occurred())
        return NULL;
    if (index >= rack->shelf.values) {
        PyErr_SetString(PyExc_IndexError, "there is no such item");
        return NULL;
    }
    rack->left_out[index] = 1;
    Py_RETURN_NONE;
}

static Py_ssize_t there(PyObject *object)
{
    return (Py_ssize_t)((struct ah_rack *)object)->there;
}

/* The numbers of a tuple, to be freed; NULL with an exception set. */
static size_t *numbers(PyObject *given)
{
    Py_ssize_t number = PyTuple_Check(given) ? PyTuple_Size(given) : -1;
    size_t *found = number < 0 ? NULL : malloc(((size_t)number + 1) * sizeof *found);

    if (!found) {
        if (number < 0)
            PyErr_SetString(PyExc_TypeError, "sizes are a tuple of numbers");
        else
            PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t index = 0; index < number; index++)
        found[index] = PyLong_AsSize_t(PyTuple_GetItem(given, index));
    if (PyErr_Occurred()) {
        free(found);
        return NULL;
    }
    return found;
}

static PyObject *bytes_for(PyObject *Py_UNUSED(type), PyObject *given)
{
    size_t bytes, *sizes = numbers(given);

    if (!sizes)
        return NULL;
    bytes = ah_shelf_bytes(sizes, (size_t)PyTuple_Size(given));
    free(sizes);
    return PyLong_FromSize_t(bytes);
}

static int are_dicts(PyObject *given, Py_ssize_t number)
{
    int all = PyTuple_Size(given) == number;

    for (Py_ssize_t index = 0; all && index < number; index++)
        all = PyDict_Check(PyTuple_GetItem(given, index));
    return all;
}

/* All that depends on the number of items; 0, or -1 where there is no memory. */
static int furnish(struct ah_rack *rack, unsigned char *memory, const size_t *sizes, size_t number)
{
    rack->kept = calloc(number + 1, sizeof(PyObject *));
    rack->extents = calloc(number + 1, sizeof *rack->extents);
    rack->left_out = calloc(number + 1, 1);
    if (!rack->kept || !rack->extents || !rack->left_out)
        return -1;
    return ah_shelf_make(&rack->shelf, memory, sizes, number, rack->group->rank);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *window, *given, *hooks, *made = NULL;
    struct ah_group *group;
    unsigned char *memory;
    struct ah_rack *rack;
    size_t bytes, *sizes;

    if (!PyArg_ParseTuple(args, "OO!O!:Shelf", &window, &PyTuple_Type, &given, &PyTuple_Type, &hooks) || !(sizes = numbers(given)))
        return NULL;
    memory = ah_window_memory(window, &bytes, &group);
    if (!memory || group->ranks != 2 || !are_dicts(hooks, PyTuple_Size(given)) ||
        ah_shelf_bytes(sizes, (size_t)PyTuple_Size(given)) > bytes) {
        PyErr_SetString(PyExc_ValueError, "Shelf(window, sizes, hooks): a window of two ranks with room for it, and a dict for each size");
    } else if ((made = allocate(type, 0))) {
        rack = (struct ah_rack *)made;
        rack->group = group;
        rack->window = Py_NewRef(window);
        rack->hooks = Py_NewRef(hooks);
        if (furnish(rack, memory, sizes, (size_t)PyTuple_Size(given)) != 0) {
            Py_CLEAR(made);
            PyErr_NoMemory();
        }
    }
    free(sizes);
    return made;
}

struct ah_rack *ah_as_rack(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? (struct ah_rack *)object : NULL;
}

static void unmake(PyObject *object)
{
    struct ah_rack *rack = (struct ah_rack *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    let_go(rack);
    free(rack->kept);
    free(rack->extents);
    free(rack->left_out);
    ah_shelf_free(&rack->shelf);
    Py_XDECREF(rack->hooks);
    Py_XDECREF(rack->window);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"bytes_for", bytes_for, METH_O | METH_STATIC, "bytes_for(sizes, /)\n--\n\nReturn how much shared memory items of these sizes need."},
    {"settle", settle, METH_NOARGS, "settle($self, /)\n--\n\nTake what the other rank has averaged, as long as it goes on to."},
    {"end", end, METH_NOARGS, "end($self, /)\n--\n\nEnd the round; return the items that are not averages."},
    {"has", has, METH_O, "has($self, index, /)\n--\n\nTell whether an item was put there in this round."},
    {"leave_out", leave_out, METH_O, "leave_out($self, index, /)\n--\n\nNever put an item there."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_methods, METHODS},
    {Py_sq_length, there},
    {Py_tp_doc, "Shelf(window, sizes, hooks): where two ranks average gradients as they come."},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "allhands._core.Shelf",
    .basicsize = sizeof(struct ah_rack),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

PyObject *ah_rack_type(void)
{
    return PyType_FromSpec(&SPEC);
}
