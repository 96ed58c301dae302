#include "shm/tensor_list.h"

#include <stdlib.h>

int ah_tensor_list_alloc(struct ah_tensor_list *tensors, size_t number)
{
    tensors->parts = calloc(number, sizeof *tensors->parts);
    tensors->ends = calloc(number, sizeof *tensors->ends);
    tensors->number = number;
    if (tensors->parts && tensors->ends)
        return 0;
    ah_tensor_list_free(tensors);
    return -1;
}

void ah_tensor_list_free(struct ah_tensor_list *tensors)
{
    free(tensors->parts);
    free(tensors->ends);
    *tensors = (struct ah_tensor_list){0};
}

void ah_tensor_list_set_ends(struct ah_tensor_list *tensors)
{
    size_t bytes = 0;

    for (size_t index = 0; index < tensors->number; index++)
        tensors->ends[index] = bytes += tensors->parts[index].bytes;
}

static int by_address(const void *one, const void *other)
{
    const struct ah_part *a = one, *b = other;

    return (a->data > b->data) - (a->data < b->data);
}

int ah_tensor_list_is_disjoint(const struct ah_tensor_list *tensors)
{
    struct ah_part *sorted = calloc(tensors->number, sizeof *sorted);
    const unsigned char *end = NULL;
    int apart = sorted != NULL;

    for (size_t index = 0; apart && index < tensors->number; index++)
        sorted[index] = tensors->parts[index];
    if (apart)
        qsort(sorted, tensors->number, sizeof *sorted, by_address);
    for (size_t index = 0; apart && index < tensors->number; index++) {
        if (sorted[index].bytes == 0)
            continue;
        apart = !end || sorted[index].data >= end;
        end = sorted[index].data + sorted[index].bytes;
    }
    free(sorted);
    return apart;
}

uint64_t ah_tensor_list_digest(const struct ah_tensor_list *tensors)
{
    uint64_t digest = 0;

    if (tensors->number == 1)
        return 0;
    /* Fibonacci hashing: the factor is odd and its bits are spread evenly. */
    for (size_t index = 0; index < tensors->number; index++)
        digest = (digest ^ tensors->parts[index].bytes) * 0x9e3779b97f4a7c15 + 1;
    return digest;
}

size_t ah_tensor_list_find(const struct ah_tensor_list *tensors, size_t at)
{
    size_t low = 0, high = tensors->number - 1;

    /* The first that ends beyond. */
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (tensors->ends[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}
