/* What the fast path knows of torch: plain tensors, dtypes, reductions, the default group, and the user's line of a
 * call. The Python type allhands._core.TorchFacts. */
#ifndef ALLHANDS_TORCH_FACTS_H
#define ALLHANDS_TORCH_FACTS_H

#include "python/object.h"

#include "python/dlpack.h"
#include "python/py_segment.h"

/* Places in the user's code that are remembered; a training loop has a handful. */
#define AH_SITES 64

/* Reductions that have a plain object in torch; see enum ah_reduction. */
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
    PyObject *tensors;    /* tuple of the types whose objects are plain: subclasses may mean something else */
    PyObject *dtypes;     /* dict: torch's dtype to ours */
    PyObject *reductions; /* tuple: torch's object for each of ours, None for none */
    PyObject *member;     /* the class whose attribute WORLD is the default group */
    PyObject *world;      /* (dict, name, type, attribute) or None: where that attribute looks, see `default_group` */
    PyObject *state, *kept; /* what was last found there, and the dict of its attributes; NULL before */
    PyCFunction negated;  /* C function of torch's method is_neg, which works for any tensor; NULL if it takes arguments */
    PyTypeObject *segment_type; /* once one was seen */
    PyObject *coalescing; /* not empty while torch puts calls off */
    PyObject *call_site;  /* function that finds the place of a call which is not the direct caller's */
    PyObject *foreign;    /* tuple of the beginnings of file names that are not the user's */
    const struct ah_dlpack *dlpack; /* NULL: tensors are described attribute by attribute */
    PyObject *names[AH_NAMES];
    struct ah_site sites[AH_SITES];
};

/* A plain tensor. */
struct ah_tensor {
    struct ah_part part;
    uint32_t dtype;
    uint32_t dims; /* how many it has, also beyond those that are kept */
    uint64_t shape[AH_ENTRY_DIMS];
};

/* The object if it is a TorchFacts, else NULL without an exception. */
struct ah_torch_facts *ah_as_torch_facts(PyObject *object);

/* Look at a tensor; -1, and no exception, where it is not plain. */
int ah_describe_tensor(struct ah_torch_facts *facts, PyObject *tensor, struct ah_tensor *plain);

/* Our number of torch's reduction, 0 for one that needs the slow path. */
uint32_t ah_reduction_of(const struct ah_torch_facts *facts, PyObject *given);

/* The segment of a group (NULL or None: the default group) as a new reference, and the group as another, if the fast
 * path can call it now; else NULL without an exception. */
struct ah_segment *ah_segment_of(struct ah_torch_facts *facts, PyObject *given, PyObject **found);

/* Put the place of the call into `text`; -1 with an exception set. */
int ah_call_site(struct ah_torch_facts *facts, char *text, size_t size);

#endif
