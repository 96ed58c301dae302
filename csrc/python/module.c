/* The Python module allhands._core: takes arguments apart and puts results together, nothing else.
 * Python.h comes first, as it may change what the system headers declare. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>

#include "python/args.h"
#include "shm/tensor_list.h"
#include "python/py_segment.h"
#include "python/grad_hook.h"
#include "python/py_flight_recorder.h"
#include "python/py_p2p.h"
#include "python/process.h"
#include "python/fast_path.h"
#include "python/py_reduce.h"
#include "python/torch_facts.h"
#include "python/py_window.h"

static PyObject *set_parent_death_signal(PyObject *Py_UNUSED(module), PyObject *args)
{
    int signal;

    if (!PyArg_ParseTuple(args, "i:set_parent_death_signal", &signal))
        return NULL;
    return PyLong_FromLong(ah_set_parent_death_signal(signal));
}

static PyObject *adopt_orphans(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(ah_adopt_orphans());
}

static PyObject *peer_credentials(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct ah_credentials peer;
    int fd, code;

    if (!PyArg_ParseTuple(args, "i:peer_credentials", &fd))
        return NULL;
    code = ah_peer_credentials(fd, &peer);
    if (code != 0) {
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("iII", (int)peer.pid, (unsigned int)peer.uid, (unsigned int)peer.gid);
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

static PyMethodDef methods[] = {
    {"set_parent_death_signal", set_parent_death_signal, METH_VARARGS,
     "set_parent_death_signal($module, signal, /)\n--\n\n"
     "Ask the kernel to send signal to this process when its parent ends; return 0 or an errno."},
    {"adopt_orphans", adopt_orphans, METH_NOARGS,
     "adopt_orphans($module, /)\n--\n\n"
     "Become the parent of every descendant whose own parent ends; return 0 or an errno."},
    {"peer_credentials", peer_credentials, METH_VARARGS,
     "peer_credentials($module, fd, /)\n--\n\n"
     "Return (pid, uid, gid) of the process at the other end of the Unix socket fd."},
    {"segment_bytes", ah_py_segment_bytes, METH_VARARGS,
     "segment_bytes($module, ranks, slot_bytes, hands=0, /)\n--\n\n"
     "Return how large the segment of a group is."},
    {"reducible", ah_py_reducible, METH_VARARGS,
     "reducible($module, dtype, reduction, /)\n--\n\n"
     "Tell whether a reduction is defined on a dtype."},
    {"reduce", ah_py_reduce, METH_VARARGS,
     "reduce($module, dtype, reduction, out, sources, bytes, /)\n--\n\n"
     "Reduce memory at several addresses into one."},
    {"disjoint", disjoint, METH_O,
     "disjoint($module, tensors, /)\n--\n\n"
     "Tell whether no two of some tensors share memory."},
    {"segment_format", ah_py_segment_format, METH_VARARGS,
     "segment_format($module, fd, ranks, slot_bytes, nonce, hands=0, victim_l3=<of the processor>, /)\n--\n\n"
     "Make fd, a file of segment_bytes zeros, the segment of a group, and give it all its memory."},
    {"flight_recorder_bytes", flight_recorder_bytes, METH_NOARGS,
     "flight_recorder_bytes($module, /)\n--\n\n"
     "Return how large a recorder is."},
    {NULL, NULL, 0, NULL},
};

static int add(PyObject *module, const char *name, PyObject *value)
{
    int code = value ? PyModule_AddObjectRef(module, name, value) : -1;

    Py_XDECREF(value);
    return code;
}

struct number {
    const char *name;
    int number;
};

#define ENTRY(name, number, text) {text, number},
static const struct number DTYPES[] = {AH_DTYPES(ENTRY){NULL, 0}};
static const struct number REDUCTIONS[] = {AH_REDUCTIONS(ENTRY){NULL, 0}};
static const struct number OPERATIONS[] = {AH_OPERATIONS(ENTRY){NULL, 0}};
static const struct number OUTCOMES[] = {AH_OUTCOMES(ENTRY){NULL, 0}};
static const struct number CONSTANTS[] = {
    {"RAW", AH_RAW}, {"COMPLEX", AH_COMPLEX}, {"MAX_RANKS", AH_MAX_RANKS}, {"MAX_HELPER_THREADS", AH_MAX_HELPER_THREADS}, {NULL, 0},
};

/* Return a dict from name to number. */
static PyObject *table(const struct number *each)
{
    PyObject *made = PyDict_New();

    for (; made && each->name; each++) {
        PyObject *number = PyLong_FromLong(each->number);

        if (!number || PyDict_SetItemString(made, each->name, number) != 0)
            Py_CLEAR(made);
        Py_XDECREF(number);
    }
    return made;
}

static int fill(PyObject *module)
{
    if (add(module, "Segment", ah_segment_type()) != 0 || add(module, "FlightRecorder", ah_recorder_type()) != 0 ||
        add(module, "TorchFacts", ah_torch_facts_type()) != 0 || add(module, "FastPath", ah_fast_path_type()) != 0 ||
        add(module, "Window", ah_window_type()) != 0 ||
        add(module, "P2P", ah_p2p_type(module)) != 0 ||
        add(module, "GradHook", ah_grad_hook_type()) != 0)
        return -1;
    for (const struct number *each = CONSTANTS; each->name; each++) {
        if (PyModule_AddIntConstant(module, each->name, each->number) != 0)
            return -1;
    }
    if (add(module, "DTYPES", table(DTYPES)) != 0 || add(module, "REDUCTIONS", table(REDUCTIONS)) != 0 ||
        add(module, "OPERATIONS", table(OPERATIONS)) != 0)
        return -1;
    return add(module, "OUTCOMES", table(OUTCOMES));
}

/* Multi-phase initialisation, no state: the module may be loaded in several interpreters of one process. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "allhands._core",
    .m_doc = "The C core of allhands.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
