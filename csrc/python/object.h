/* What the Python types of this module have in common. Each file of this folder includes it, by its own header or
 * directly, before any system header, because Python.h may change what these declare. */
#ifndef ALLHANDS_OBJECT_H
#define ALLHANDS_OBJECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec ah_fast_path_spec, ah_grad_hook_spec, ah_p2p_spec, ah_recorder_spec, ah_segment_spec,
    ah_torch_facts_spec, ah_window_spec;

/* An entry in a type's list of methods. */
#define AH_METHOD(name, flags, text) {#name, (PyCFunction)(void (*)(void))(name), flags, text}

/* The object if its type has the constructor `make`, else NULL and no exception. The module has no state in which to
 * find its types. */
static inline void *ah_object_made_by(PyObject *object, newfunc make)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)make ? object : NULL;
}

/* Free the memory of an object; it holds a reference to its type. */
static inline void ah_object_free(void *object)
{
    PyTypeObject *type = Py_TYPE((PyObject *)object);

    PyObject_Free(object);
    Py_DECREF(type);
}

#endif
