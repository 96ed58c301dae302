#include "python/torch_facts.h"

#include <stdio.h>
#include <string.h>

#include "shm/reduce.h"

static const char *const NAMES[AH_NAMES] = {
    [AH_NAME_DATA_PTR] = "data_ptr",
    [AH_NAME_DTYPE] = "dtype",
    [AH_NAME_IS_CPU] = "is_cpu",
    [AH_NAME_IS_CONTIGUOUS] = "is_contiguous",
    [AH_NAME_IS_NEG] = "is_neg",
    [AH_NAME_SHAPE] = "shape",
    [AH_NAME_WORLD] = "WORLD",
    [AH_NAME_SEGMENT] = "segment",
    [AH_NAME_FILENAME] = "co_filename",
};

/* Whether attribute or method `name` of a tensor is true; not if it raises. */
static int is(struct ah_torch_facts *facts, PyObject *tensor, enum ah_name name, int call)
{
    PyObject *answer = call ? PyObject_CallMethodObjArgs(tensor, facts->names[name], NULL)
                            : PyObject_GetAttr(tensor, facts->names[name]);
    int yes = answer == Py_True;

    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    return yes;
}

static int is_tensor(const struct ah_torch_facts *facts, PyObject *object)
{
    for (Py_ssize_t index = 0; index < PyTuple_Size(facts->tensors); index++) {
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(facts->tensors, index))
            return 1;
    }
    return 0;
}

static uint32_t dtype_of(struct ah_torch_facts *facts, PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, facts->names[AH_NAME_DTYPE]);
    PyObject *code = dtype ? PyDict_GetItemWithError(facts->dtypes, dtype) : NULL;
    uint32_t number = code ? (uint32_t)PyLong_AsUnsignedLong(code) : 0;

    Py_XDECREF(dtype);
    if (PyErr_Occurred())
        PyErr_Clear();
    return number;
}

/* Whether the tensor's negative bit is set (or cannot be read). Not remembered, because an assignment to `data` can
 * change it and nothing else. */
static int is_negated(struct ah_torch_facts *facts, PyObject *tensor)
{
    PyObject *answer;
    int no;

    answer = facts->negated ? facts->negated(tensor, NULL)
                            : PyObject_CallMethodObjArgs(tensor, facts->names[AH_NAME_IS_NEG], NULL);
    no = answer == Py_False;
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    return !no;
}

/* Describe a tensor by its attributes. */
static int describe_by_attributes(struct ah_torch_facts *facts, PyObject *tensor, struct ah_tensor *plain,
                                  size_t *elements)
{
    PyObject *address, *shape;

    plain->dtype = is(facts, tensor, AH_NAME_IS_CPU, 0) ? dtype_of(facts, tensor) : 0;
    if (plain->dtype == 0 || !is(facts, tensor, AH_NAME_IS_CONTIGUOUS, 1))
        return -1;
    shape = PyObject_GetAttr(tensor, facts->names[AH_NAME_SHAPE]);
    if (!shape || !PyTuple_Check(shape)) {
        Py_XDECREF(shape);
        return -1;
    }
    plain->dims = (uint32_t)PyTuple_Size(shape);
    for (uint32_t dim = 0; dim < plain->dims; dim++) {
        size_t size = PyLong_AsSize_t(PyTuple_GetItem(shape, dim));

        *elements *= size;
        if (dim < AH_ENTRY_DIMS)
            plain->shape[dim] = size;
    }
    Py_DECREF(shape);
    address = PyObject_CallMethodObjArgs(tensor, facts->names[AH_NAME_DATA_PTR], NULL);
    plain->part.data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

/* Our number for a dtype of DLPack; 0 for those that the fast path does not handle. */
static uint32_t dtype_from(const struct ah_dlpack_tensor *found)
{
    uint32_t wide = found->bits == 8 ? 0 : found->bits == 16 ? 1 : found->bits == 32 ? 2 : found->bits == 64 ? 3 : 9;

    if (found->lanes != 1 || wide == 9)
        return 0;
    switch (found->code) {
    case AH_DLPACK_UINT:
        return AH_U8 + 2 * wide;
    case AH_DLPACK_INT:
        return AH_I8 + 2 * wide;
    case AH_DLPACK_FLOAT:
        return wide == 1 ? AH_F16 : wide == 2 ? AH_F32 : wide == 3 ? AH_F64 : 0;
    case AH_DLPACK_BFLOAT:
        return wide == 1 ? AH_BF16 : 0;
    case AH_DLPACK_BOOL:
        return wide == 0 ? AH_BOOL : 0;
    default:
        return 0;
    }
}

/* Describe a tensor with one call of torch. */
static int describe_by_dlpack(struct ah_torch_facts *facts, PyObject *tensor, struct ah_tensor *plain, size_t *elements)
{
    struct ah_dlpack_tensor found;

    if (facts->dlpack->describe(tensor, &found) != 0 || found.device_type != AH_DLPACK_CPU)
        return -1;
    plain->dtype = dtype_from(&found);
    plain->dims = (uint32_t)found.dims;
    plain->part.data = (unsigned char *)found.data + found.byte_offset;
    for (int32_t dim = found.dims - 1; dim >= 0; dim--) {
        /* The stride of a dimension of size one has no meaning. */
        if (found.shape[dim] != 1 && (size_t)found.strides[dim] != *elements && *elements != 0)
            return -1;
        *elements *= (size_t)found.shape[dim];
        if (dim < AH_ENTRY_DIMS)
            plain->shape[dim] = (uint64_t)found.shape[dim];
    }
    return plain->dtype != 0 ? 0 : -1;
}

int ah_describe_tensor(struct ah_torch_facts *facts, PyObject *tensor, struct ah_tensor *plain)
{
    size_t elements = 1, size;
    int asked;

    if (!is_tensor(facts, tensor))
        return -1;
    asked = (facts->dlpack ? describe_by_dlpack : describe_by_attributes)(facts, tensor, plain, &elements);
    size = asked == 0 ? ah_dtype_bytes(plain->dtype) : 1;
    /* The memory of a tensor with the negative bit holds its values negated. */
    if (asked != 0 || is_negated(facts, tensor)) {
        PyErr_Clear();
        return -1;
    }
    /* A tensor without elements may have no address; arithmetic on none is not defined. */
    if (!plain->part.data)
        plain->part.data = (unsigned char *)"";
    plain->part.bytes = elements * size;
    plain->part.window = NULL;
    return 0;
}

uint32_t ah_reduction_of(const struct ah_torch_facts *facts, PyObject *given)
{
    if (!given)
        return AH_SUM;
    for (uint32_t code = 1; code < AH_TORCH_REDUCTIONS; code++) {
        if (PyTuple_GetItem(facts->reductions, code) == given)
            return code;
    }
    return 0;
}

/* Whether `state` is of the known type; then `kept` has its attributes. */
static int is_known(struct ah_torch_facts *facts, PyObject *state)
{
    PyObject *kept;

    if (state == facts->state)
        return 1;
    if ((PyObject *)Py_TYPE(state) != PyTuple_GetItem(facts->world, 2))
        return 0;
    kept = PyObject_GenericGetDict(state, NULL);
    if (!kept) {
        PyErr_Clear();
        return 0;
    }
    Py_XDECREF(facts->state);
    Py_XDECREF(facts->kept);
    facts->state = Py_NewRef(state);
    facts->kept = kept;
    return 1;
}

/* The default group, as a new reference. `WORLD` is a property in Python that reads another one, and costs more than
 * the rest of the fast path's checks. So torch's state is read directly if it has the known type. */
static PyObject *default_group(struct ah_torch_facts *facts)
{
    if (facts->world != Py_None) {
        PyObject *state = PyDict_GetItemWithError(PyTuple_GetItem(facts->world, 0), PyTuple_GetItem(facts->world, 1));
        PyObject *found = NULL;

        if (state && is_known(facts, state))
            found = PyDict_GetItemWithError(facts->kept, PyTuple_GetItem(facts->world, 3));

        if (found)
            return Py_NewRef(found);
    }
    return PyObject_GetAttr(facts->member, facts->names[AH_NAME_WORLD]);
}

struct ah_segment *ah_segment_of(struct ah_torch_facts *facts, PyObject *given, PyObject **found)
{
    PyObject *group, *object = NULL;
    struct ah_segment *segment;

    *found = NULL;
    if (PyDict_Size(facts->coalescing) != 0)
        return NULL;
    group = given && given != Py_None ? Py_NewRef(given) : default_group(facts);
    if (group && group != Py_None)
        object = PyObject_GetAttr(group, facts->names[AH_NAME_SEGMENT]);
    if (!object) {
        PyErr_Clear();
        Py_XDECREF(group);
        return NULL;
    }
    segment = Py_TYPE(object) == facts->segment_type ? (struct ah_segment *)object : ah_as_segment(object);
    if (segment && !facts->segment_type)
        facts->segment_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object));
    if (!segment || !segment->recorder || segment->fast_path_closed || segment->queued ||
        segment->group.ranks > AH_MAX_RANKS) {
        Py_DECREF(object);
        Py_DECREF(group);
        return NULL;
    }
    *found = group;
    return segment;
}

/* The instruction that a frame executes. In Python since 3.11, outside the limited API; without it `call_site` is
 * called. The frame's attribute f_lasti would cost a small call a fifteenth of its time. */
int PyFrame_GetLasti(PyFrameObject *frame) __attribute__((weak));

/* The user's line of a call ------------------------------------------------------------------------------- */

static int is_foreign(const struct ah_torch_facts *facts, PyObject *filename)
{
    for (Py_ssize_t index = 0; index < PyTuple_Size(facts->foreign); index++) {
        if (PyUnicode_Tailmatch(filename, PyTuple_GetItem(facts->foreign, index), 0, PY_SSIZE_T_MAX, -1) == 1)
            return 1;
    }
    return 0;
}

/* Call the Python function that walks up to the first frame of the user's code. */
static int find_site(struct ah_torch_facts *facts, char *text, size_t size)
{
    PyObject *answer = PyObject_CallNoArgs(facts->call_site);
    const char *found = answer ? PyUnicode_AsUTF8AndSize(answer, NULL) : NULL;

    if (found)
        ah_entry_text(text, size, found);
    Py_XDECREF(answer);
    return found ? 0 : -1;
}

static int describe(struct ah_torch_facts *facts, PyFrameObject *frame, PyObject *code, char *text, size_t size)
{
    PyObject *filename = PyObject_GetAttr(code, facts->names[AH_NAME_FILENAME]);
    const char *name = filename ? PyUnicode_AsUTF8AndSize(filename, NULL) : NULL;
    char place[512];

    if (!name || is_foreign(facts, filename)) {
        Py_XDECREF(filename);
        return -1;
    }
    snprintf(place, sizeof place, "%s:%d", strrchr(name, '/') ? strrchr(name, '/') + 1 : name,
             PyFrame_GetLineNumber(frame));
    ah_entry_text(text, size, place);
    Py_DECREF(filename);
    return 0;
}

int ah_call_site(struct ah_torch_facts *facts, char *text, size_t size)
{
    PyFrameObject *frame = PyEval_GetFrame();
    int at = frame && PyFrame_GetLasti ? PyFrame_GetLasti(frame) : -1;
    struct ah_site *site;
    PyObject *code;

    if (at < 0)
        return find_site(facts, text, size);
    code = (PyObject *)PyFrame_GetCode(frame);
    /* Finding the line of an instruction takes longer the longer the function is, so it is cached. The reference to the
     * code object keeps its address from being reused. */
    site = &facts->sites[((uintptr_t)code / 64 + (unsigned int)at) % AH_SITES];
    if (site->code != code || site->at != at) {
        char found[sizeof site->text];

        if (describe(facts, frame, code, found, sizeof found) != 0) {
            Py_DECREF(code);
            return PyErr_Occurred() ? -1 : find_site(facts, text, size);
        }
        Py_XDECREF(site->code);
        site->code = Py_NewRef(code);
        site->at = at;
        memcpy(site->text, found, sizeof found);
    }
    Py_DECREF(code);
    memcpy(text, site->text, size < sizeof site->text ? size : sizeof site->text);
    return 0;
}

/* The type ------------------------------------------------------------------------------------------------- */

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    struct ah_torch_facts *self = (struct ah_torch_facts *)PyType_GenericAlloc(type, 0);
    PyObject *capsule, *is_neg;

    if (!self)
        return NULL;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!OO!OOO:TorchFacts", &PyTuple_Type, &self->tensors, &PyDict_Type,
                          &self->dtypes, &PyTuple_Type, &self->reductions, &self->member, &PyDict_Type,
                          &self->coalescing, &self->call_site, &PyTuple_Type, &self->foreign, &capsule, &self->world,
                          &is_neg))
        goto failed;
    self->args = Py_NewRef(args);
    if (self->world != Py_None && (!PyTuple_Check(self->world) || PyTuple_Size(self->world) != 4 ||
                                   !PyDict_Check(PyTuple_GetItem(self->world, 0)))) {
        PyErr_SetString(PyExc_TypeError, "a dict, a name, a type and a name, or None");
        goto failed;
    }
    if (PyTuple_Size(self->reductions) != AH_TORCH_REDUCTIONS) {
        PyErr_SetString(PyExc_TypeError, "an object or None for each reduction");
        goto failed;
    }
    if (capsule != Py_None) {
        const struct ah_dlpack *found = PyCapsule_GetPointer(capsule, AH_DLPACK_CAPSULE);

        if (!found)
            goto failed;
        if (found->major == AH_DLPACK_MAJOR && found->describe)
            self->dlpack = found;
    }
    if (PyCFunction_Check(is_neg) && PyCFunction_GetFlags(is_neg) == METH_NOARGS)
        self->negated = PyCFunction_GetFunction(is_neg);
    for (size_t name = 0; name < AH_NAMES; name++) {
        if (!(self->names[name] = PyUnicode_InternFromString(NAMES[name])))
            goto failed;
    }
    return (PyObject *)self;

failed:
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void unmake(struct ah_torch_facts *self)
{
    Py_XDECREF(self->args);
    Py_XDECREF(self->state);
    Py_XDECREF(self->kept);
    Py_XDECREF((PyObject *)self->segment_type);
    for (size_t name = 0; name < AH_NAMES; name++)
        Py_XDECREF(self->names[name]);
    for (size_t site = 0; site < AH_SITES; site++)
        Py_XDECREF(self->sites[site].code);
    ah_object_free(self);
}

static PyType_Slot SLOTS[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, unmake},
    {Py_tp_doc,
     "TorchFacts(tensors, dtypes, reductions, member, coalescing, call_site, foreign, capsule, world, is_neg): "
                "what the fast path knows of torch."},
    {0, NULL},
};

PyType_Spec ah_torch_facts_spec = {
    .name = "allhands._core.TorchFacts",
    .basicsize = sizeof(struct ah_torch_facts),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = SLOTS,
};

struct ah_torch_facts *ah_as_torch_facts(PyObject *object)
{
    return ah_object_made_by(object, make);
}
