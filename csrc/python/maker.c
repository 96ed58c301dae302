/* Making a segment, before anyone has a view of it: functions of the module. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/maker.h"

#include <errno.h>
#include <sys/mman.h>

#include "shm/reduce.h"
#include "shm/segment.h"
#include "mpi/wall.h"

PyObject *ah_py_segment_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, hands = 0;
    Py_ssize_t slot_bytes;

    if (!PyArg_ParseTuple(args, "In|I:segment_bytes", &ranks, &slot_bytes, &hands))
        return NULL;
    return PyLong_FromSize_t(ah_segment_bytes(ranks, (size_t)slot_bytes, hands));
}

PyObject *ah_py_wall_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks;

    if (!PyArg_ParseTuple(args, "I:wall_bytes", &ranks))
        return NULL;
    return PyLong_FromSize_t(ah_wall_bytes(ranks));
}

PyObject *ah_py_reducible(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int dtype, reduction;

    if (!PyArg_ParseTuple(args, "II:reducible", &dtype, &reduction))
        return NULL;
    return PyBool_FromLong(ah_reducible(dtype, reduction));
}

PyObject *ah_py_segment_format(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int ranks, hands = 0;
    Py_ssize_t slot_bytes, nonce_bytes;
    const char *nonce;
    size_t bytes;
    void *memory;
    int fd, code, swift = ah_is_swift();

    if (!PyArg_ParseTuple(args, "iIny#|Ip:segment_format", &fd, &ranks, &slot_bytes, &nonce, &nonce_bytes, &hands, &swift))
        return NULL;
    if (nonce_bytes != 16 || ranks == 0 || hands > AH_MOST_HANDS) {
        PyErr_SetString(PyExc_ValueError, "a nonce of 16 bytes, at least one rank, and no more hands than MOST_HANDS");
        return NULL;
    }
    bytes = ah_segment_bytes(ranks, (size_t)slot_bytes, hands);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    ah_segment_format(memory, ranks, (size_t)slot_bytes, hands, swift, (const unsigned char *)nonce);
    /* Give every page now: running out of memory is found out here, not by a signal in the middle of a copy. */
    Py_BEGIN_ALLOW_THREADS
    code = madvise(memory, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    Py_END_ALLOW_THREADS
    munmap(memory, bytes);
    if (code != 0 && code != EINVAL) { /* EINVAL: a kernel before 5.14 gives pages when they are touched */
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}
