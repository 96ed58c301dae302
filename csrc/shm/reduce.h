/* Reducing n arrays into one, element by element, in the order given: the same bits on whichever rank. */
#ifndef ALLHANDS_REDUCE_H
#define ALLHANDS_REDUCE_H

#include <stddef.h>
#include <stdint.h>

/* Beside the number of a real type in a call: complex numbers with such parts. They are reduced as their parts, and
 * compared as what they are. */
#define AH_COMPLEX 0x100u

/* The numbers are part of the segment's version: ranks compare them. */
enum ah_dtype {
    AH_U8 = 1,
    AH_I8,
    AH_U16,
    AH_I16,
    AH_U32,
    AH_I32,
    AH_U64,
    AH_I64,
    AH_BOOL,
    AH_F16,
    AH_BF16,
    AH_F32,
    AH_F64,
    AH_RAW, /* bytes that are only moved */
};

/* PREMUL_SUM is a sum of what the caller has multiplied already; its own number lets ranks tell it from a plain one. */
enum ah_reduction { AH_SUM = 1, AH_AVG, AH_PRODUCT, AH_MIN, AH_MAX, AH_BAND, AH_BOR, AH_BXOR, AH_PREMUL_SUM };

/* Bytes of one element, 0 for a number that is no dtype. */
size_t ah_dtype_bytes(uint32_t dtype);

/* Whether `reduction` is defined on `dtype`. */
int ah_reducible(uint32_t dtype, uint32_t reduction);

/* out[i] = sources[0][i] op sources[1][i] op …; `out` may be one of the sources. AVG divides by `sources`' number.
 * 16-bit floats are summed in 32 bits and rounded once. */
void ah_reduce(uint32_t dtype, uint32_t reduction, void *out, const void *const *sources, uint32_t number,
               size_t elements);

/* The same to two places; `also` may be one of the sources too, or NULL. */
void ah_reduce_twice(uint32_t dtype, uint32_t reduction, void *out, void *also, const void *const *sources, uint32_t number,
                     size_t elements);

#endif
