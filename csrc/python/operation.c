#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/operation.h"

#include <stdlib.h>
#include <string.h>

#include "python/args.h"
#include "shm/tensor_list.h"
#include "python/call_lock.h"

/* Take one argument apart. What comes in parts ('i', 'o', 'l') is left, and bytes ('b') were taken with their address. */
static int take(char what, PyObject *const *arg, struct ah_move *move)
{
    switch (what) {
    case 'a':
        return ah_as_part(arg[0], arg[1], &move->data);
    case 'd':
        return ah_as_number(*arg, &move->dtype);
    case 'x':
        return ah_as_number(*arg, &move->reduction);
    case 'r':
        return ah_as_number(*arg, &move->root);
    case 't':
        return ah_as_time(*arg, &move->limit_ns);
    default:
        return 0;
    }
}

/* Do an operation whose arguments are what `takes` says: a letter for each, see `take`. */
static PyObject *ask(struct ah_gated *self, enum ah_operation_code kind, const char *takes, PyObject *const *args, Py_ssize_t n)
{
    const char *in_place = strchr(takes, 'i'), *out_place = strchr(takes, 'o'), *bundle_place = strchr(takes, 'l');
    struct ah_part *in = NULL, *out = NULL;
    struct ah_move move = {.kind = kind};
    PyObject *result = NULL;

    if (ah_count(n, (Py_ssize_t)strlen(takes)) != 0)
        return NULL;
    for (Py_ssize_t index = 0; index < n; index++) {
        if (take(takes[index], &args[index], &move) != 0)
            return NULL;
    }
    /* Parts come last, because they have to be freed. */
    if ((!in_place || ah_as_parts(self->gate.size, args[in_place - takes], &in) == 0) &&
        (!out_place || ah_as_parts(self->gate.size, args[out_place - takes], &out) == 0) &&
        (!bundle_place || ah_as_bundle(args[bundle_place - takes], &move.bundle) == 0)) {
        move.in = in;
        move.out = out;
        result = ah_gate_ended(self->gate.move(self, &move));
    }
    free(in);
    free(out);
    ah_bundle_free(&move.bundle);
    return result;
}

#define METHOD(name, kind, takes)                                                   \
    PyObject *ah_move_##name(PyObject *object, PyObject *const *args, Py_ssize_t n) \
    {                                                                               \
        return ask((struct ah_gated *)object, kind, takes, args, n);                \
    }

METHOD(barrier, AH_BARRIER, "t")
METHOD(all_reduce, AH_ALL_REDUCE, "abdxt")
METHOD(all_reduce_bundle, AH_ALL_REDUCE, "ldxt")
METHOD(reduce, AH_REDUCE, "abdxrt")
METHOD(broadcast, AH_BROADCAST, "abdrt")
METHOD(all_gather, AH_ALL_GATHER, "abodt")
METHOD(gather, AH_GATHER, "abodrt")
METHOD(scatter, AH_SCATTER, "iabdrt")
METHOD(reduce_scatter, AH_REDUCE_SCATTER, "iabdxt")
METHOD(all_to_all, AH_ALL_TO_ALL, "iodt")
