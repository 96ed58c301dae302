/* Reducing n arrays into one, element by element, in the order given: the same bits on every rank. */
#ifndef ALLHANDS_REDUCE_H
#define ALLHANDS_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#include "shm/codes.h"

/* Bytes of one element, 0 for a number that is no dtype. */
size_t ah_dtype_bytes(uint32_t dtype);

/* Whether `reduction` is defined on `dtype`. */
int ah_reducible(uint32_t dtype, uint32_t reduction);

/* out[i] = sources[0][i] op sources[1][i] op …; `out` may be one of the sources. AVG divides by `number`.
 * 16-bit floats are summed in 32 bits and rounded once. */
void ah_reduce(uint32_t dtype, uint32_t reduction, void *out, const void *const *sources, uint32_t number,
               size_t elements);

/* The same to two places; `also` may be one of the sources too, or NULL. */
void ah_reduce_twice(uint32_t dtype, uint32_t reduction, void *out, void *also, const void *const *sources,
                     uint32_t number, size_t elements);

#endif
