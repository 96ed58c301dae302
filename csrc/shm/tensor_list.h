/* Tensor lists: tensors of one type that an operation handles as if they were contiguous. */
#ifndef ALLHANDS_TENSOR_LIST_H
#define ALLHANDS_TENSOR_LIST_H

#include "collectives/collective.h"
#include "shm/copy.h"

/* Smallest copy that may bypass the caches: each such copy costs a fence. */
#define AH_BYPASS_LEAST_BYTES ((size_t)4 << 10)

/* Allocate a list of `number` tensors; the caller writes the parts and then calls `ah_tensor_list_set_ends`. Returns -1
 * without memory. */
int ah_tensor_list_alloc(struct ah_tensor_list *tensors, size_t number);

void ah_tensor_list_free(struct ah_tensor_list *tensors);

/* Compute the end of each tensor. */
void ah_tensor_list_set_ends(struct ah_tensor_list *tensors);

/* Whether no two tensors overlap. Overlapping ones must be reduced one after the other. */
int ah_tensor_list_is_disjoint(const struct ah_tensor_list *tensors);

/* Return a digest of the sizes, which ranks compare beside their sum; 0 for a single tensor. */
uint64_t ah_tensor_list_digest(const struct ah_tensor_list *tensors);

/* Index of the tensor with byte `at`, which must exist. */
size_t ah_tensor_list_find(const struct ah_tensor_list *tensors, size_t at);

/* Inline, so that a single tensor, the usual case, costs no more than its address. */

/* The address of byte `at`; `span` is set to the number of contiguous bytes there. */
static inline unsigned char *ah_tensor_list_at(const struct ah_tensor_list *tensors, size_t at, size_t *span)
{
    size_t index = tensors->number == 1 ? 0 : ah_tensor_list_find(tensors, at);

    *span = tensors->ends[index] - at;
    return tensors->parts[index].data + (tensors->parts[index].bytes - *span);
}

/* Copy `bytes` from position `at` to contiguous memory that other ranks read. */
static inline void ah_tensor_list_copy_in(const struct ah_tensor_list *tensors, size_t at, struct ah_nt_store *store,
                                          unsigned char *to, size_t bytes)
{
    for (size_t some, span; bytes > 0; at += some, to += some, bytes -= some) {
        const unsigned char *from = ah_tensor_list_at(tensors, at, &span);

        some = ah_min(span, bytes);
        ah_nt_store_copy(store, to, from, some);
    }
}

/* Copy from contiguous memory to position `at`; with `bypass` past the caches, except short ones, which cost a fence
 * each. */
static inline void ah_tensor_list_copy_out(const struct ah_tensor_list *tensors, size_t at, const unsigned char *from,
                                           size_t bytes, int bypass)
{
    for (size_t some, span; bytes > 0; at += some, from += some, bytes -= some) {
        unsigned char *to = ah_tensor_list_at(tensors, at, &span);

        some = ah_min(span, bytes);
        ah_copy(to, from, some, bypass && some >= AH_BYPASS_LEAST_BYTES);
    }
}

#endif
