#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/call_lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "python/args.h"

/* How long to wait for a turn before the handlers of signals are let run. */
#define TURN_NS 50000000L

/* Whose turn it is. Not a lock of Python's: taking one that is free asks for the time first, which costs a small call a tenth
 * of all its time. */
enum turn { NOBODYS, TAKEN, WANTED /* taken, and someone sleeps until it is given back */ };

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

void ah_gate_open(struct ah_gate *gate, uint32_t rank, uint32_t size, const uint64_t *sequence,
                  int (*move)(void *mover, struct ah_move *move))
{
    gate->rank = rank;
    gate->size = size;
    gate->sequence = sequence;
    gate->move = move;
}

void ah_gate_close(struct ah_gate *gate)
{
    Py_XDECREF(gate->ranks);
    Py_XDECREF(gate->board);
}

int ah_gate_take(struct ah_gate *gate)
{
    uint32_t none = NOBODYS;

    return atomic_compare_exchange_strong_explicit(&gate->turn, &none, TAKEN, memory_order_acquire, memory_order_relaxed);
}

void ah_gate_give(struct ah_gate *gate)
{
    if (atomic_exchange_explicit(&gate->turn, NOBODYS, memory_order_release) == WANTED)
        syscall(SYS_futex, &gate->turn, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Sleep until it may be our turn, and take it if it is. */
static int take_late(struct ah_gate *gate)
{
    const struct timespec limit = {.tv_nsec = TURN_NS};

    if (atomic_exchange_explicit(&gate->turn, WANTED, memory_order_acquire) == NOBODYS)
        return 1;
    syscall(SYS_futex, &gate->turn, FUTEX_WAIT_PRIVATE, WANTED, &limit, NULL, 0);
    return atomic_exchange_explicit(&gate->turn, WANTED, memory_order_acquire) == NOBODYS;
}

/* Wait for our turn, however long the calls before take; each of them has a deadline. */
PyObject *ah_gate_enter(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ah_gate *gate = gate_of(object);

    while (!ah_gate_take(gate)) {
        int ours;

        Py_BEGIN_ALLOW_THREADS
        ours = take_late(gate);
        Py_END_ALLOW_THREADS
        if (ours)
            break;
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
    return Py_NewRef(object);
}

PyObject *ah_gate_leave(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    ah_gate_give(gate_of(object));
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
