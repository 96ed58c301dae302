/* The Python module allhands._core: its functions, constants and types. */
#include "python/object.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "python/args.h"
#include "python/py_segment.h"
#include "shm/reduce.h"
#include "shm/tensor_list.h"

/* Reducing this much takes less time than releasing the GIL and getting it back. */
#define SHORT_BYTES ((size_t)4 << 10)

static PyObject *set_parent_death_signal(PyObject *Py_UNUSED(module), PyObject *args)
{
    int signal;

    if (!PyArg_ParseTuple(args, "i:set_parent_death_signal", &signal))
        return NULL;
    /* prctl reads its argument as unsigned long, so a negative number would become a huge one. */
    if (signal < 0)
        return PyLong_FromLong(EINVAL);
    return PyLong_FromLong(prctl(PR_SET_PDEATHSIG, (unsigned long)signal, 0UL, 0UL, 0UL) == 0 ? 0 : errno);
}

static PyObject *adopt_orphans(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0UL, 0UL, 0UL) == 0 ? 0 : errno);
}

static PyObject *flight_recorder_bytes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromSize_t(ah_flight_recorder_bytes());
}

static PyObject *disjoint(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    struct ah_tensor_list list;
    int found;

    if (ah_as_tensor_list(tensors, &list) != 0)
        return NULL;
    found = ah_tensor_list_is_disjoint(&list);
    ah_tensor_list_free(&list);
    return PyBool_FromLong(found);
}

static PyObject *reduce(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long out, bytes;
    unsigned int dtype, reduction;
    const void **sources;
    PyThreadState *thread;
    Py_ssize_t number;
    PyObject *given;
    size_t each;

    if (!PyArg_ParseTuple(args, "IIKO!K:reduce", &dtype, &reduction, &out, &PyTuple_Type, &given, &bytes))
        return NULL;
    dtype &= ~AH_COMPLEX;
    number = PyTuple_Size(given);
    each = ah_dtype_bytes(dtype);
    if (number < 1 || number > UINT32_MAX || each == 0 || bytes % each != 0 || !ah_reducible(dtype, reduction)) {
        PyErr_SetString(PyExc_ValueError, "reduce(dtype, reduction, out, sources, bytes)");
        return NULL;
    }
    sources = malloc((size_t)number * sizeof *sources);
    if (!sources)
        return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < number; index++) {
        sources[index] = PyLong_AsVoidPtr(PyTuple_GetItem(given, index));
        if (PyErr_Occurred()) {
            free(sources);
            return NULL;
        }
    }
    thread = bytes > SHORT_BYTES ? PyEval_SaveThread() : NULL;
    ah_reduce(dtype, reduction, (void *)(uintptr_t)out, sources, (uint32_t)number, (size_t)bytes / each);
    if (thread)
        PyEval_RestoreThread(thread);
    free(sources);
    Py_RETURN_NONE;
}

static PyObject *reducible(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int dtype, reduction;

    if (!PyArg_ParseTuple(args, "II:reducible", &dtype, &reduction))
        return NULL;
    return PyBool_FromLong(ah_reducible(dtype, reduction));
}

static PyMethodDef METHODS[] = {
    AH_METHOD(set_parent_death_signal, METH_VARARGS,
              "set_parent_death_signal($module, signal, /)\n--\n\n"
              "Ask the kernel to send signal to this process when its parent ends; return 0 or an errno."),
    AH_METHOD(adopt_orphans, METH_NOARGS,
              "adopt_orphans($module, /)\n--\n\n"
              "Become the parent of every descendant whose own parent ends; return 0 or an errno."),
    AH_METHOD(reducible, METH_VARARGS,
              "reducible($module, dtype, reduction, /)\n--\n\nTell whether a reduction is defined on a dtype."),
    AH_METHOD(reduce, METH_VARARGS,
              "reduce($module, dtype, reduction, out, sources, bytes, /)\n--\n\n"
              "Reduce memory at several addresses into one."),
    AH_METHOD(disjoint, METH_O, "disjoint($module, tensors, /)\n--\n\nTell whether no two tensors share memory."),
    AH_METHOD(flight_recorder_bytes, METH_NOARGS,
              "flight_recorder_bytes($module, /)\n--\n\nReturn the size of a flight recorder."),
    {"segment_bytes", ah_py_segment_bytes, METH_VARARGS,
     "segment_bytes($module, ranks, slot_bytes, helper_threads=0, /)\n--\n\nReturn the size of a group's segment."},
    {"segment_format", ah_py_segment_format, METH_VARARGS,
     "segment_format($module, fd, ranks, slot_bytes, nonce, helper_threads=0, victim_l3=<of the processor>, /)\n--\n\n"
     "Make fd, a file of segment_bytes zeros, the segment of a group, and allocate its memory."},
    {NULL, NULL, 0, NULL},
};

struct number {
    const char *name;
    int number;
};

#define ENTRY(name, number, text) {text, number},
static const struct number DTYPES[] = {AH_DTYPES(ENTRY){NULL, 0}};
static const struct number REDUCTIONS[] = {AH_REDUCTIONS(ENTRY){NULL, 0}};
static const struct number OPERATIONS[] = {AH_OPERATIONS(ENTRY){NULL, 0}};
static const struct number OUTCOMES[] = {AH_OUTCOMES(ENTRY){NULL, 0}};

/* Add a dict from name to number. */
static int add_numbers(PyObject *module, const char *name, const struct number *each)
{
    PyObject *made = PyDict_New();
    int code = made ? PyModule_AddObjectRef(module, name, made) : -1;

    for (; code == 0 && each->name; each++) {
        PyObject *number = PyLong_FromLong(each->number);

        code = number ? PyDict_SetItemString(made, each->name, number) : -1;
        Py_XDECREF(number);
    }
    Py_XDECREF(made);
    return code;
}

static int fill(PyObject *module)
{
    PyType_Spec *const specs[] = {&ah_segment_spec, &ah_window_spec, &ah_p2p_spec, &ah_recorder_spec,
                                  &ah_torch_facts_spec, &ah_fast_path_spec, &ah_grad_hook_spec};

    for (size_t index = 0; index < sizeof specs / sizeof *specs; index++) {
        PyObject *type = PyType_FromSpec(specs[index]);
        int code = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

        Py_XDECREF(type);
        if (code != 0)
            return -1;
    }
    if (PyModule_AddIntConstant(module, "RAW", AH_RAW) != 0 ||
        PyModule_AddIntConstant(module, "COMPLEX", AH_COMPLEX) != 0 ||
        PyModule_AddIntConstant(module, "MAX_RANKS", AH_MAX_RANKS) != 0 ||
        PyModule_AddIntConstant(module, "MAX_HELPER_THREADS", AH_MAX_HELPER_THREADS) != 0)
        return -1;
    if (add_numbers(module, "DTYPES", DTYPES) != 0 || add_numbers(module, "REDUCTIONS", REDUCTIONS) != 0 ||
        add_numbers(module, "OPERATIONS", OPERATIONS) != 0)
        return -1;
    return add_numbers(module, "OUTCOMES", OUTCOMES);
}

/* Multi-phase initialisation, no state: the module may be loaded in several interpreters of one process. */
static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "allhands._core",
    .m_doc = "The C core of allhands.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
