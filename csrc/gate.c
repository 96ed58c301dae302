#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gate.h"

#include "argument.h"

/* How long to wait for a turn before the handlers of signals are let run. */
#define TURN_US 50000

static struct ah_gate *gate_of(PyObject *object)
{
    return &((struct ah_gated *)object)->gate;
}

/* Ctrl-C must end a call that waits for someone who does not come. */
int ah_gate_pulse(void *context)
{
    struct ah_gated *self = context;
    int raised;

    PyEval_RestoreThread(self->gate.thread);
    raised = PyErr_CheckSignals();
    self->gate.thread = PyEval_SaveThread();
    return raised;
}

PyObject *ah_gate_ended(int code)
{
    return code == AH_INTERRUPTED ? NULL : PyLong_FromLong(code);
}

int ah_gate_open(struct ah_gate *gate, uint32_t rank, uint32_t size, const uint64_t *sequence,
                 int (*move)(void *mover, struct ah_move *move))
{
    gate->rank = rank;
    gate->size = size;
    gate->sequence = sequence;
    gate->move = move;
    gate->turn = PyThread_allocate_lock();
    if (!gate->turn)
        PyErr_NoMemory();
    return gate->turn ? 0 : -1;
}

void ah_gate_close(struct ah_gate *gate)
{
    if (gate->turn)
        PyThread_free_lock(gate->turn);
    Py_XDECREF(gate->ranks);
    Py_XDECREF(gate->board);
}

/* Wait for our turn, however long the calls before take; each of them has a deadline. */
PyObject *ah_gate_enter(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ah_gate *gate = gate_of(object);

    while (!PyThread_acquire_lock(gate->turn, NOWAIT_LOCK)) {
        PyLockStatus status;

        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(gate->turn, TURN_US, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_ACQUIRED)
            break;
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
    return Py_NewRef(object);
}

PyObject *ah_gate_leave(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    PyThread_release_lock(gate_of(object)->turn);
    Py_RETURN_NONE;
}

PyObject *ah_gate_sequence(PyObject *object, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLongLong(*gate_of(object)->sequence);
}

PyObject *ah_gate_introduce(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    struct ah_gate *gate = gate_of(object);
    const char *name;

    if (ah_count(n, 4) != 0 || ah_as_time(args[0], &gate->limit_ns) != 0)
        return NULL;
    name = PyUnicode_AsUTF8AndSize(args[1], NULL);
    if (!name)
        return NULL;
    ah_note_text(gate->name, sizeof gate->name, name);
    if (args[2] != Py_None && (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != (Py_ssize_t)gate->size)) {
        PyErr_SetString(PyExc_ValueError, "a global rank for each rank");
        return NULL;
    }
    if (!ah_as_notice(args[3])) {
        PyErr_SetString(PyExc_TypeError, "not a board");
        return NULL;
    }
    Py_XDECREF(gate->board);
    gate->board = Py_NewRef(args[3]);
    gate->notice = ah_as_notice(args[3]);
    Py_CLEAR(gate->ranks);
    if (args[2] != Py_None)
        gate->ranks = Py_NewRef(args[2]);
    Py_RETURN_NONE;
}
