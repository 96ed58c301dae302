/* The part of DLPack's C exchange API that the core uses: one call into torch describes a tensor. The layout is fixed
 * per major version; this is version 1. */
#ifndef ALLHANDS_DLPACK_H
#define ALLHANDS_DLPACK_H

#include <stdint.h>

#define AH_DLPACK_MAJOR 1

/* The name of the capsule, and the attribute of a tensor type that has it. */
#define AH_DLPACK_CAPSULE "dlpack_exchange_api"

#define AH_DLPACK_CPU 1

enum ah_dlpack_code {
    AH_DLPACK_INT = 0,
    AH_DLPACK_UINT = 1,
    AH_DLPACK_FLOAT = 2,
    AH_DLPACK_BFLOAT = 4,
    AH_DLPACK_BOOL = 6,
};

struct ah_dlpack_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides; /* in elements; NULL without dimensions */
    uint64_t byte_offset;
};

struct ah_dlpack {
    uint32_t major, minor;
    void *unused[4]; /* an earlier version; functions that allocate, own and wrap a tensor */
    /* Describe a Python tensor, valid while it is unchanged; -1 with an exception set. NULL where not supported. */
    int (*describe)(void *object, struct ah_dlpack_tensor *tensor);
};

#endif
