/* A tensors: tensors of one type that an operation takes as one, as if they lay side by side. */
#ifndef ALLHANDS_BUNDLE_H
#define ALLHANDS_BUNDLE_H

#include "collectives/collective.h"
#include "shm/copy.h"

/* A tensor's bytes from which on a copy may go past the caches. */
#define AH_BYPASS_LEAST_BYTES ((size_t)4 << 10)

/* Make reusable for `number` tensors, whose parts the caller writes and then counts. 0, or -1 where there is no memory. */
int ah_tensor_list_alloc(struct ah_tensor_list *tensors, size_t number);

void ah_tensor_list_free(struct ah_tensor_list *tensors);

/* Note where each tensor ends. */
void ah_tensor_list_set_ends(struct ah_tensor_list *tensors);

/* Whether no two tensors share memory. Those that do must be consumed one after the other. */
int ah_tensor_list_is_disjoint(const struct ah_tensor_list *tensors);

/* Return a digest of the sizes, which ranks compare beside their sum; 0 for a single tensor. */
uint64_t ah_tensor_list_digest(const struct ah_tensor_list *tensors);

/* The number of the tensor that has the byte `at`, which must be there. */
size_t ah_tensor_list_find(const struct ah_tensor_list *tensors, size_t at);

/* Here, so that a tensor alone, the usual case, costs nothing more than its address. */

/* Where the byte `at` lies, which must be there; `span` is set to how many bytes lie there side by side. */
static inline unsigned char *ah_tensor_list_at(const struct ah_tensor_list *tensors, size_t at, size_t *span)
{
    size_t index = tensors->number == 1 ? 0 : ah_tensor_list_find(tensors, at);

    *span = tensors->ends[index] - at;
    return tensors->parts[index].data + (tensors->parts[index].bytes - *span);
}

/* Copy `bytes` from `at` on to memory in one piece that others read. */
static inline void ah_tensor_list_copy_in(const struct ah_tensor_list *tensors, size_t at, struct ah_nt_store *store, unsigned char *to, size_t bytes)
{
    for (size_t some, span; bytes > 0; at += some, to += some, bytes -= some) {
        const unsigned char *from = ah_tensor_list_at(tensors, at, &span);

        some = ah_min(span, bytes);
        ah_nt_store_copy(store, to, from, some);
    }
}

/* Copy them from there; with `stream` past the caches, but for short ones, which cost a fence each. */
static inline void ah_tensor_list_copy_out(const struct ah_tensor_list *tensors, size_t at, const unsigned char *from, size_t bytes, int stream)
{
    for (size_t some, span; bytes > 0; at += some, from += some, bytes -= some) {
        unsigned char *to = ah_tensor_list_at(tensors, at, &span);

        some = ah_min(span, bytes);
        ah_copy(to, from, some, stream && some >= AH_BYPASS_LEAST_BYTES);
    }
}

#endif
