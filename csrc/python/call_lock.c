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

static struct ah_call_lock *gate_of(PyObject *object)
{
    return &((struct ah_locked *)object)->lock;
}

/* Ctrl-C must end a call that waits for someone who does not come. */
int ah_call_lock_check_signals(void *context)
{
    struct ah_locked *self = context;
    int raised;

    PyEval_RestoreThread(self->lock.thread);
    raised = PyErr_CheckSignals();
    self->lock.thread = PyEval_SaveThread();
    return raised;
}

PyObject *ah_outcome_to_python(int code)
{
    return code == AH_INTERRUPTED ? NULL : PyLong_FromLong(code);
}

void ah_call_lock_init(struct ah_call_lock *lock, uint32_t rank, uint32_t size, const uint64_t *sequence,
                  int (*move)(void *object, struct ah_operation *move))
{
    lock->rank = rank;
    lock->size = size;
    lock->sequence = sequence;
    lock->move = move;
}

void ah_call_lock_clear(struct ah_call_lock *lock)
{
    Py_XDECREF(lock->ranks);
    Py_XDECREF((PyObject *)lock->recorder);
}

int ah_call_lock_try(struct ah_call_lock *lock)
{
    uint32_t none = NOBODYS;

    return atomic_compare_exchange_strong_explicit(&lock->turn, &none, TAKEN, memory_order_acquire, memory_order_relaxed);
}

void ah_call_lock_release(struct ah_call_lock *lock)
{
    if (atomic_exchange_explicit(&lock->turn, NOBODYS, memory_order_release) == WANTED)
        syscall(SYS_futex, &lock->turn, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Sleep until it may be our turn, and take it if it is. */
static int take_late(struct ah_call_lock *lock)
{
    const struct timespec limit = {.tv_nsec = TURN_NS};

    if (atomic_exchange_explicit(&lock->turn, WANTED, memory_order_acquire) == NOBODYS)
        return 1;
    syscall(SYS_futex, &lock->turn, FUTEX_WAIT_PRIVATE, WANTED, &limit, NULL, 0);
    return atomic_exchange_explicit(&lock->turn, WANTED, memory_order_acquire) == NOBODYS;
}

/* Wait for our turn, however long the calls before take; each of them has a deadline. */
PyObject *ah_call_lock_enter(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ah_call_lock *lock = gate_of(object);

    while (!ah_call_lock_try(lock)) {
        int ours;

        Py_BEGIN_ALLOW_THREADS
        ours = take_late(lock);
        Py_END_ALLOW_THREADS
        if (ours)
            break;
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
    return Py_NewRef(object);
}

PyObject *ah_call_lock_exit(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    ah_call_lock_release(gate_of(object));
    Py_RETURN_NONE;
}

PyObject *ah_call_lock_sequence(PyObject *object, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLongLong(*gate_of(object)->sequence);
}

PyObject *ah_call_lock_configure(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    struct ah_call_lock *lock = gate_of(object);
    const char *name;

    if (ah_check_argument_count(n, 4) != 0 || ah_as_int64(args[0], &lock->limit_ns) != 0)
        return NULL;
    name = PyUnicode_AsUTF8AndSize(args[1], NULL);
    if (!name)
        return NULL;
    ah_entry_text(lock->name, sizeof lock->name, name);
    if (args[2] != Py_None && (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != (Py_ssize_t)lock->size)) {
        PyErr_SetString(PyExc_ValueError, "a global rank for each rank");
        return NULL;
    }
    if (!ah_as_recorder(args[3])) {
        PyErr_SetString(PyExc_TypeError, "not a recorder");
        return NULL;
    }
    Py_XDECREF((PyObject *)lock->recorder);
    lock->recorder = (struct ah_recorder_object *)Py_NewRef(args[3]);
    Py_CLEAR(lock->ranks);
    if (args[2] != Py_None)
        lock->ranks = Py_NewRef(args[2]);
    Py_RETURN_NONE;
}
