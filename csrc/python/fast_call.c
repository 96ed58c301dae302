#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/fast_call.h"

#include <string.h>

#include "shm/reduce.h"

/* As large as the fields of a note, so that they are copied without being measured. */
#define NAME(name, number, text) [number] = text,
static const char DTYPES[AH_RAW + 1][sizeof((struct ah_note *)0)->dtype] = {AH_DTYPES(NAME)[AH_RAW] = "bytes"};
static const char REDUCTIONS[AH_PREMUL_SUM + 1][sizeof((struct ah_note *)0)->reduction] = {AH_REDUCTIONS(NAME)};

int ah_call_peer(const struct ah_quick_call *call, int fallback, uint32_t *rank)
{
    PyObject *own = call->given[GROUP_PEER], *global = call->given[PEER];
    int named = own && own != Py_None, found;
    long value;

    if (named && global && global != Py_None)
        return NOT_OURS; /* torch says what is wrong with that */
    if (!named && (!global || global == Py_None)) {
        if (fallback < 0)
            return NOT_OURS;
        value = fallback;
    } else {
        if (!PyLong_CheckExact(named ? own : global))
            return NOT_OURS;
        value = PyLong_AsLong(named ? own : global);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return NOT_OURS;
        }
    }
    if (!named && call->gated->gate.ranks) {
        for (found = 0; found < (int)call->gated->gate.size; found++) {
            if (PyLong_AsLong(PyTuple_GetItem(call->gated->gate.ranks, found)) == value)
                break;
        }
        value = found;
    }
    *rank = (uint32_t)value;
    return value >= 0 && value < (long)call->gated->gate.size ? DONE : NOT_OURS;
}

int ah_call_announce(struct ah_quick_call *call, const struct ah_plain *shown, uint32_t reduction, int32_t root)
{
    const struct ah_gate *gate = &call->gated->gate;
    struct ah_note *note;

    note = ah_note_begin(&gate->notice->board);
    memcpy(note->operation, call->name, sizeof note->operation);
    memcpy(note->group, gate->name, sizeof note->group);
    memcpy(note->dtype, DTYPES[shown ? shown->dtype : 0], sizeof note->dtype);
    memcpy(note->reduction, REDUCTIONS[reduction], sizeof note->reduction);
    note->bytes = shown ? shown->part.bytes : 0;
    note->root = root;
    note->sequence = *gate->sequence;
    note->main = PyThread_get_thread_ident() == gate->notice->main;
    note->dims = 0;
    if (shown) {
        note->dims = shown->dims;
        memcpy(note->shape, shown->shape, sizeof note->shape);
    }
    if (ah_place(call->way, note->site, sizeof note->site) != 0) {
        ah_note_set(note, AH_NOTE_FAILED);
        return RAISED;
    }
    ah_note_set(note, AH_NOTE_RUNNING);
    call->note = note;
    call->number = note->number;
    call->began_ns = note->started_ns;
    return DONE;
}

int ah_call_conclude(struct ah_quick_call *call, int code, uint32_t culprit, int peer)
{
    char site[sizeof call->note->site];
    PyObject *raised;

    memcpy(site, call->note->site, sizeof site);
    /* With more under way than there are places, the note may be another's by now. */
    if (call->note->number == call->number)
        ah_note_set(call->note, code == AH_OK ? AH_NOTE_DONE : AH_NOTE_FAILED);
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

/* MPI may still write to or read from the tensors of a call that it was left in the middle of: they stay for ever. */
static void keep(struct ah_quick_call *call)
{
    static const enum role ROLES_KEPT[] = {OUT, IN};
    PyObject *kind, *value, *trace;

    PyErr_Fetch(&kind, &value, &trace);
    for (size_t index = 0; index < sizeof ROLES_KEPT / sizeof *ROLES_KEPT; index++) {
        PyObject *given = call->given[ROLES_KEPT[index]];

        if (given && !(PyList_Check(given) ? PyList_AsTuple(given) : Py_NewRef(given)))
            PyErr_Clear();
    }
    PyErr_Restore(kind, value, trace);
}

/* Tell the group that a signal's handler raised in the middle: the others would wait for this rank. */
static void tell_interrupted(struct ah_quick_call *call)
{
    PyObject *kind, *value, *trace, *told;

    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    told = PyObject_CallMethod(call->group, "interrupted", "O", value ? value : Py_None);
    if (!told)
        PyErr_Clear();
    Py_XDECREF(told);
    PyErr_Restore(kind, value, trace);
}

int ah_call_move(struct ah_quick_call *call, const struct ah_plain *shown, int32_t root, struct ah_move *move)
{
    struct ah_gate *gate = &call->gated->gate;
    uint32_t culprit;
    int code;

    if (!ah_gate_take(gate))
        return NOT_OURS;
    code = ah_call_announce(call, shown, move->reduction, root);
    if (code != DONE) {
        ah_gate_give(gate);
        return code;
    }
    if (shown) {
        move->data = shown->part;
        move->dtype = shown->dtype;
    }
    move->root = (uint32_t)root;
    move->limit_ns = gate->limit_ns;
    move->note = call->note;
    code = gate->move(call->gated, move);
    culprit = call->segment ? call->segment->group.culprit : 0;
    if (code != AH_OK && !call->segment) {
        keep(call);
        if (code == AH_INTERRUPTED)
            tell_interrupted(call);
    }
    ah_gate_give(gate);
    return ah_call_conclude(call, code, culprit, -1);
}

int ah_call_list(const struct ah_quick_call *call, PyObject *list, struct ah_part *parts, struct ah_plain *first)
{
    uint32_t ranks = call->gated->gate.size;

    if (!list || !PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)ranks)
        return NOT_OURS;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct ah_plain each;

        if (ah_look(call->way, PyList_GetItem(list, rank), &each) != 0 || (rank > 0 && each.dtype != first->dtype)) {
            return NOT_OURS;
        }
        parts[rank] = each.part;
        if (rank == 0)
            *first = each;
    }
    return DONE;
}

int ah_call_cut(const struct ah_quick_call *call, struct ah_plain whole, size_t bytes, struct ah_part *parts)
{
    uint32_t ranks = call->gated->gate.size;

    if (whole.part.bytes != bytes * ranks)
        return NOT_OURS;
    for (uint32_t rank = 0; rank < ranks; rank++)
        parts[rank] = (struct ah_part){.data = whole.part.data + rank * bytes, .bytes = bytes};
    return DONE;
}
