/* A bundle: tensors of one type that an operation takes as one, as if they lay side by side. */
#ifndef ALLHANDS_BUNDLE_H
#define ALLHANDS_BUNDLE_H

#include "collectives/collective.h"
#include "shm/copy.h"

/* A tensor's bytes from which on a copy may go past the caches. */
#define AH_SHORT_BYTES ((size_t)4 << 10)

/* Make room for `number` tensors, whose parts the caller writes and then counts. 0, or -1 where there is no memory. */
int ah_bundle_make(struct ah_bundle *bundle, size_t number);

void ah_bundle_free(struct ah_bundle *bundle);

/* Note where each tensor ends. */
void ah_bundle_count(struct ah_bundle *bundle);

/* Whether no two tensors share memory. Those that do must be taken one after the other. */
int ah_bundle_is_apart(const struct ah_bundle *bundle);

/* What ranks compare of the sizes beside their sum, in the place of a call's root: -1 for a single tensor, else less. */
int16_t ah_bundle_digest(const struct ah_bundle *bundle);

/* The number of the tensor that has the byte `at`, which must be there. */
size_t ah_bundle_find(const struct ah_bundle *bundle, size_t at);

/* Here, so that a tensor alone, the usual case, costs nothing more than its address. */

/* Where the byte `at` lies, which must be there; `span` is set to how many bytes lie there side by side. */
static inline unsigned char *ah_bundle_place(const struct ah_bundle *bundle, size_t at, size_t *span)
{
    size_t index = bundle->number == 1 ? 0 : ah_bundle_find(bundle, at);

    *span = bundle->ends[index] - at;
    return bundle->parts[index].data + (bundle->parts[index].bytes - *span);
}

/* Copy `bytes` from `at` on to memory in one piece that others read. */
static inline void ah_bundle_get(const struct ah_bundle *bundle, size_t at, struct ah_store *store, unsigned char *to, size_t bytes)
{
    for (size_t some, span; bytes > 0; at += some, to += some, bytes -= some) {
        const unsigned char *from = ah_bundle_place(bundle, at, &span);

        some = ah_min(span, bytes);
        ah_fill(store, to, from, some);
    }
}

/* Copy them from there; with `stream` past the caches, but for short ones, which cost a fence each. */
static inline void ah_bundle_put(const struct ah_bundle *bundle, size_t at, const unsigned char *from, size_t bytes, int stream)
{
    for (size_t some, span; bytes > 0; at += some, from += some, bytes -= some) {
        unsigned char *to = ah_bundle_place(bundle, at, &span);

        some = ah_min(span, bytes);
        ah_copy(to, from, some, stream && some >= AH_SHORT_BYTES);
    }
}

#endif
