#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/fast_call.h"

#include <string.h>

#include "shm/reduce.h"

/* As large as the fields of a entry, so that they are copied without being measured. */
#define NAME(name, number, text) [number] = text,
static const char DTYPES[AH_RAW + 1][sizeof((struct ah_entry *)0)->dtype] = {AH_DTYPES(NAME)[AH_RAW] = "bytes"};
static const char REDUCTIONS[AH_PREMUL_SUM + 1][sizeof((struct ah_entry *)0)->reduction] = {AH_REDUCTIONS(NAME)};

int ah_fast_call_peer(const struct ah_fast_call *call, int fallback, uint32_t *rank)
{
    PyObject *own = call->given[GROUP_PEER], *global = call->given[PEER];
    int named = own && own != Py_None, found;
    long value;

    if (named && global && global != Py_None)
        return SLOW_PATH; /* torch says what is wrong with that */
    if (!named && (!global || global == Py_None)) {
        if (fallback < 0)
            return SLOW_PATH;
        value = fallback;
    } else {
        if (!PyLong_CheckExact(named ? own : global))
            return SLOW_PATH;
        value = PyLong_AsLong(named ? own : global);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return SLOW_PATH;
        }
    }
    if (!named && call->locked->lock.ranks) {
        for (found = 0; found < (int)call->locked->lock.size; found++) {
            if (PyLong_AsLong(PyTuple_GetItem(call->locked->lock.ranks, found)) == value)
                break;
        }
        value = found;
    }
    *rank = (uint32_t)value;
    return value >= 0 && value < (long)call->locked->lock.size ? DONE : SLOW_PATH;
}

int ah_fast_call_record(struct ah_fast_call *call, const struct ah_tensor *shown, uint32_t reduction, int32_t root)
{
    const struct ah_call_lock *lock = &call->locked->lock;
    struct ah_entry *entry;

    entry = ah_entry_begin(&lock->recorder->recorder);
    memcpy(entry->operation, call->name, sizeof entry->operation);
    memcpy(entry->group, lock->name, sizeof entry->group);
    memcpy(entry->dtype, DTYPES[shown ? shown->dtype : 0], sizeof entry->dtype);
    memcpy(entry->reduction, REDUCTIONS[reduction], sizeof entry->reduction);
    entry->bytes = shown ? shown->part.bytes : 0;
    entry->root = root;
    entry->sequence = *lock->sequence;
    entry->main_thread = PyThread_get_thread_ident() == lock->recorder->main_thread;
    entry->dims = 0;
    if (shown) {
        entry->dims = shown->dims;
        memcpy(entry->shape, shown->shape, sizeof entry->shape);
    }
    if (ah_call_site(call->facts, entry->site, sizeof entry->site) != 0) {
        ah_entry_set_state(entry, AH_ENTRY_FAILED);
        return RAISED;
    }
    ah_entry_set_state(entry, AH_ENTRY_RUNNING);
    call->entry = entry;
    call->number = entry->number;
    call->began_ns = entry->started_ns;
    return DONE;
}

int ah_fast_call_finish(struct ah_fast_call *call, int code, uint32_t culprit, int peer)
{
    char site[sizeof call->entry->site];
    PyObject *raised;

    memcpy(site, call->entry->site, sizeof site);
    /* With more under way than there are places, the entry may be another's by now. */
    if (call->entry->number == call->number)
        ah_entry_set_state(call->entry, code == AH_OK ? AH_ENTRY_DONE : AH_ENTRY_FAILED);
    if (code == AH_OK)
        return DONE;
    if (code != AH_INTERRUPTED) {
        raised = PyObject_CallMethod(call->group, "failed", "iI(ssd)i", code, (unsigned int)culprit, call->name, site,
                                     (double)call->began_ns / 1e9, peer);
        Py_XDECREF(raised);
        if (raised)
            PyErr_SetString(PyExc_SystemError, "the group did not say what went wrong");
    }
    return RAISED;
}

int ah_fast_call_run(struct ah_fast_call *call, const struct ah_tensor *shown, int32_t root, struct ah_operation *move)
{
    struct ah_call_lock *lock = &call->locked->lock;
    uint32_t culprit;
    int code;

    if (!ah_call_lock_try(lock))
        return SLOW_PATH;
    code = ah_fast_call_record(call, shown, move->reduction, root);
    if (code != DONE) {
        ah_call_lock_release(lock);
        return code;
    }
    if (shown) {
        move->data = shown->part;
        move->dtype = shown->dtype;
    }
    move->root = (uint32_t)root;
    move->limit_ns = lock->limit_ns;
    move->entry = call->entry;
    code = lock->move(call->locked, move);
    culprit = call->segment ? call->segment->group.culprit : 0;
    ah_call_lock_release(lock);
    return ah_fast_call_finish(call, code, culprit, -1);
}

int ah_fast_call_parts(const struct ah_fast_call *call, PyObject *list, struct ah_part *parts, struct ah_tensor *first)
{
    uint32_t ranks = call->locked->lock.size;

    if (!list || !PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)ranks)
        return SLOW_PATH;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct ah_tensor each;

        if (ah_describe_tensor(call->facts, PyList_GetItem(list, rank), &each) != 0 || (rank > 0 && each.dtype != first->dtype)) {
            return SLOW_PATH;
        }
        parts[rank] = each.part;
        if (rank == 0)
            *first = each;
    }
    return DONE;
}

int ah_fast_call_split(const struct ah_fast_call *call, struct ah_tensor whole, size_t bytes, struct ah_part *parts)
{
    uint32_t ranks = call->locked->lock.size;

    if (whole.part.bytes != bytes * ranks)
        return SLOW_PATH;
    for (uint32_t rank = 0; rank < ranks; rank++)
        parts[rank] = (struct ah_part){.data = whole.part.data + rank * bytes, .bytes = bytes};
    return DONE;
}
