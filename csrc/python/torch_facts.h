/* What the fast path knows of torch: plain tensors, dtypes, reductions, the default group, and the user's line of a
 * call. The Python type allhands._core.TorchFacts. */
#ifndef ALLHANDS_TORCH_FACTS_H
#define ALLHANDS_TORCH_FACTS_H

#include "python/object.h"

#include "python/dlpack.h"
#include "python/py_segment.h"

/* Cached places in the user's code; a training loop has a handful. */
#define AH_SITES 64

/* Reductions that are one object in torch; see enum ah_reduction. */
#define AH_TORCH_REDUCTIONS 9

enum ah_name {
    AH_NAME_DATA_PTR,
    AH_NAME_DTYPE,
    AH_NAME_IS_CPU,
    AH_NAME_IS_CONTIGUOUS,
    AH_NAME_IS_NEG,
    AH_NAME_SHAPE,
    AH_NAME_WORLD,
    AH_NAME_SEGMENT,
    AH_NAME_FILENAME,
    AH_NAMES,
};

struct ah_site {
    PyObject *code;
    int at; /* the instruction */
    char text[sizeof((struct ah_entry *)0)->site];
};

struct ah_torch_facts {
    PyObject_HEAD
    PyObject *args;       /* of the constructor: owns the objects that it gave */
    PyObject *tensors;    /* tuple of the types of plain tensors; a subclass may override anything */
    PyObject *dtypes;     /* dict: torch's dtype to ours */
    PyObject *reductions; /* tuple: torch's object for each of ours, None for none */
    PyObject *member;     /* the class whose attribute WORLD is the default group */
    PyObject *world;      /* (dict, name, type, attribute) or None: where WORLD is stored, see `default_group` */
    PyObject *state, *kept; /* the object last found there, and the dict of its attributes; NULL before */
    PyCFunction negated;  /* C function of torch's is_neg, for any tensor; NULL if it takes arguments */
    PyTypeObject *segment_type; /* NULL before the first segment */
    PyObject *coalescing; /* dict: not empty while torch coalesces calls */
    PyObject *call_site;  /* function: the place of a call whose direct caller is not the user's code */
    PyObject *foreign;    /* tuple of prefixes of file names that are not the user's */
    const struct ah_dlpack *dlpack; /* NULL: tensors are described by their attributes */
    PyObject *names[AH_NAMES];
    struct ah_site sites[AH_SITES];
};

/* A plain tensor: contiguous, on the CPU, of a dtype that the core has, not negated. */
struct ah_tensor {
    struct ah_part part;
    uint32_t dtype;
    uint32_t dims; /* also beyond those in `shape` */
    uint64_t shape[AH_ENTRY_DIMS];
};

/* The object if it is a TorchFacts, else NULL without an exception. */
struct ah_torch_facts *ah_as_torch_facts(PyObject *object);

/* Describe a tensor. Returns -1 without setting an exception if it is not plain. */
int ah_describe_tensor(struct ah_torch_facts *facts, PyObject *tensor, struct ah_tensor *plain);

/* Our number of a reduction of torch, 0 for one that needs the slow path. */
uint32_t ah_reduction_of(const struct ah_torch_facts *facts, PyObject *given);

/* The segment of a group (NULL or None: the default group) as a new reference, and the group as another, if the fast
 * path can call it now; else NULL without an exception. */
struct ah_segment *ah_segment_of(struct ah_torch_facts *facts, PyObject *given, PyObject **found);

/* Write "file:line" of the call to `text`; -1 with an exception set. */
int ah_call_site(struct ah_torch_facts *facts, char *text, size_t size);

#endif
