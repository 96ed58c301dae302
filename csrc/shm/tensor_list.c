#include "shm/tensor_list.h"

#include <stdlib.h>

int ah_bundle_make(struct ah_bundle *bundle, size_t number)
{
    bundle->parts = calloc(number, sizeof *bundle->parts);
    bundle->ends = calloc(number, sizeof *bundle->ends);
    bundle->number = number;
    if (bundle->parts && bundle->ends)
        return 0;
    ah_bundle_free(bundle);
    return -1;
}

void ah_bundle_free(struct ah_bundle *bundle)
{
    free(bundle->parts);
    free(bundle->ends);
    *bundle = (struct ah_bundle){0};
}

void ah_bundle_count(struct ah_bundle *bundle)
{
    size_t bytes = 0;

    for (size_t index = 0; index < bundle->number; index++)
        bundle->ends[index] = bytes += bundle->parts[index].bytes;
}

static int by_address(const void *one, const void *other)
{
    const struct ah_part *a = one, *b = other;

    return (a->data > b->data) - (a->data < b->data);
}

int ah_bundle_is_apart(const struct ah_bundle *bundle)
{
    struct ah_part *sorted = calloc(bundle->number, sizeof *sorted);
    const unsigned char *end = NULL;
    int apart = sorted != NULL;

    for (size_t index = 0; apart && index < bundle->number; index++)
        sorted[index] = bundle->parts[index];
    if (apart)
        qsort(sorted, bundle->number, sizeof *sorted, by_address);
    for (size_t index = 0; apart && index < bundle->number; index++) {
        if (sorted[index].bytes == 0)
            continue;
        apart = !end || sorted[index].data >= end;
        end = sorted[index].data + sorted[index].bytes;
    }
    free(sorted);
    return apart;
}

int16_t ah_bundle_digest(const struct ah_bundle *bundle)
{
    uint64_t mixed = 0;

    if (bundle->number == 1)
        return -1;
    /* An odd factor with bits all over, so that each size reaches the upper bits, which are taken. */
    for (size_t index = 0; index < bundle->number; index++)
        mixed = (mixed ^ bundle->parts[index].bytes) * 0x9e3779b97f4a7c15;
    return (int16_t)(-2 - (int)(mixed >> 50));
}

size_t ah_bundle_find(const struct ah_bundle *bundle, size_t at)
{
    size_t low = 0, high = bundle->number - 1;

    /* The first that ends beyond. */
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (bundle->ends[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
