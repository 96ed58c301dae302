#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/operation.h"

#include <stdlib.h>
#include <string.h>

#include "python/args.h"
#include "shm/tensor_list.h"
#include "python/call_lock.h"

/* Take one argument apart. What comes in parts ('i', 'o', 'l') is left, and bytes ('b') were taken with their address. */
static int take(char what, PyObject *const *arg, struct ah_operation *move)
{
    switch (what) {
    case 'a':
        return ah_as_part(arg[0], arg[1], &move->data);
    case 'd':
        return ah_as_uint32(*arg, &move->dtype);
    case 'x':
        return ah_as_uint32(*arg, &move->reduction);
    case 'r':
        return ah_as_uint32(*arg, &move->root);
    case 't':
        return ah_as_int64(*arg, &move->limit_ns);
    default:
        return 0;
    }
}

/* Do an operation whose arguments are what `takes` says: a request for each, see `take`. */
static PyObject *ask(struct ah_locked *self, enum ah_operation_code kind, const char *takes, PyObject *const *args, Py_ssize_t n)
{
    const char *in_place = strchr(takes, 'i'), *out_place = strchr(takes, 'o'), *bundle_place = strchr(takes, 'l');
    struct ah_part *in = NULL, *out = NULL;
    struct ah_operation move = {.kind = kind};
    PyObject *result = NULL;

    if (ah_check_argument_count(n, (Py_ssize_t)strlen(takes)) != 0)
        return NULL;
    for (Py_ssize_t index = 0; index < n; index++) {
        if (take(takes[index], &args[index], &move) != 0)
            return NULL;
    }
    /* Parts come last, because they have to be freed. */
    if ((!in_place || ah_as_parts(self->lock.size, args[in_place - takes], &in) == 0) &&
        (!out_place || ah_as_parts(self->lock.size, args[out_place - takes], &out) == 0) &&
        (!bundle_place || ah_as_tensor_list(args[bundle_place - takes], &move.tensors) == 0)) {
        move.in = in;
        move.out = out;
        result = ah_outcome_to_python(self->lock.move(self, &move));
    }
    free(in);
    free(out);
    ah_tensor_list_free(&move.tensors);
    return result;
}

#define METHOD(name, kind, takes)                                                   \
    PyObject *ah_operation_##name(PyObject *object, PyObject *const *args, Py_ssize_t n) \
    {                                                                               \
        return ask((struct ah_locked *)object, kind, takes, args, n);                \
    }

METHOD(barrier, AH_BARRIER, "t")
METHOD(all_reduce, AH_ALL_REDUCE, "abdxt")
METHOD(all_reduce_list, AH_ALL_REDUCE, "ldxt")
METHOD(reduce, AH_REDUCE, "abdxrt")
METHOD(broadcast, AH_BROADCAST, "abdrt")
METHOD(all_gather, AH_ALL_GATHER, "abodt")
METHOD(gather, AH_GATHER, "abodrt")
METHOD(scatter, AH_SCATTER, "iabdrt")
METHOD(reduce_scatter, AH_REDUCE_SCATTER, "iabdxt")
METHOD(all_to_all, AH_ALL_TO_ALL, "iodt")
