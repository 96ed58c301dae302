/* all_reduce and reduce. Each chunk is cut into one slice per rank: a rank copies in all slices but its own, reduces
 * its own slice from all slots, and copies the other results out; up to three chunks are in flight. A small tensor
 * takes one step: every rank reads all slots, or all payloads if it fits there. A tensor in a window on every rank is
 * reduced in place. Large ones are split between helper threads. All of this works on tensor lists.
 *
 * Copies to tensors bypass the caches where these do not hold all ranks' tensors, so that a line that was read is
 * evicted when its result arrives. Copies to slots may bypass them too (nt_store.h). */
#include <stdalign.h>
#include <string.h>

#include "shm/tensor_list.h"
#include "shm/fingerprint.h"
#include "collectives/collective.h"
#include "shm/copy.h"
#include "shm/helper_threads.h"
#include "shm/reduce.h"
#include "shm/cico_slot.h"
#include "shm/wait.h"

/* All ranks' data together: up to this size, reading everything costs less than a second synchronisation. */
#define ONE_SHOT_BYTES ((size_t)64 << 10)

/* Slices begin on cache lines of their own. */
#define SLICE_BYTES 64

/* From this number of ranks on, a tensor that fits into a slot is one chunk. */
#define MANY_RANKS 5

/* Bytes reduced at a time: the result stays in L1 until it is stored to all its places. */
#define BLOCK_BYTES ((size_t)16 << 10)

/* All ranks' tensors together: from this size on they do not fit into a common L3 (bypassing the caches and not, 4
 * ranks on 2 cores, 16 MiB: 3.9 and 4.5 ms, 256 MiB: 65 and 84, but 4 MiB: 0.95 and 0.89; 2 ranks, 64 MiB: 6.4 and 6.7,
 * but 8 MiB: 0.60 and 0.53). */
#define BYPASS_BYTES ((size_t)32 << 20)

struct task {
    struct ah_group *group;
    struct ah_tensor_list tensors;
    size_t bytes, at; /* of all chunks, and where in the tensors they begin */
    const struct ah_window *window;
    uint32_t dtype, reduction;
    uint32_t first; /* ticket of the first chunk */
    size_t chunk;
    int has_result; /* whether this rank gets the result */
    int store_twice; /* whether a result is stored to tensor and slot at once */
    int bypass;      /* whether copies to tensors bypass the caches */
};

/* After the comparison: whether a rank announced a window, so that this ticket carries no data. */
static int any_window(const struct ah_group *group)
{
    for (uint32_t rank = 0; group->windows_made && rank < group->ranks; rank++) {
        if (ah_fingerprint_of(group, rank)->window != 0)
            return 1;
    }
    return 0;
}

/* After the comparison: whether all ranks announced the same place. */
static int same_window(const struct ah_group *group)
{
    const struct ah_fingerprint *mine = ah_fingerprint_of(group, group->rank);

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        const struct ah_fingerprint *theirs = ah_fingerprint_of(group, rank);

        if (theirs->window != mine->window || theirs->offset != mine->offset)
            return 0;
    }
    return 1;
}

/* Where the slice of `rank` begins in a chunk of `bytes`. */
static size_t slice(const struct task *task, uint32_t rank, size_t bytes)
{
    size_t each = (bytes + task->group->ranks - 1) / task->group->ranks;

    each = (each + SLICE_BYTES - 1) / SLICE_BYTES * SLICE_BYTES;
    return ah_min(rank * each, bytes);
}

/* Largest single chunk: more synchronisations would cost more than they gain. */
static size_t single_chunk_limit(const struct ah_group *group)
{
    return group->ranks >= MANY_RANKS ? group->slot_bytes : ah_min(group->slot_bytes, AH_CHUNK_BYTES);
}

/* Number of threads of each rank that share `bytes`. */
static uint32_t part_count_of(const struct ah_group *group, size_t bytes)
{
    return bytes <= single_chunk_limit(group) ? 1 : ah_part_count(group, bytes);
}

/* Chunk size for a tensor of `bytes`. Smaller chunks cost synchronisations, which are context switches where ranks
 * outnumber cores (4 ranks on 2 cores, 256 MiB: 88 ms against 119 in chunks of 128 KiB and 96 in 256 KiB; 2 ranks,
 * 1 MiB: 54 us against 65 and 58); larger ones do not fit into L2 (113 ms in chunks of 1 MiB). With helper threads a
 * chunk is as large as their slots. */
static size_t chunk_of(const struct ah_group *group, size_t bytes)
{
    if (bytes <= single_chunk_limit(group))
        return group->slot_bytes;
    return ah_min(group->slot_bytes, part_count_of(group, bytes) > 1 ? AH_HELPER_SLOT_BYTES : AH_CHUNK_BYTES);
}

/* The slot of `rank` for a ticket. */
static unsigned char *slot_of(const struct task *task, uint32_t rank, uint32_t ticket)
{
    size_t bytes = ah_min(task->chunk, task->bytes);

    return ah_cico_slot_at(task->group, rank, ticket, bytes, bytes);
}

static int copy_in(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_chunk_bytes(task->bytes, task->chunk, index);
    size_t own = slice(task, group->rank, bytes), next = slice(task, group->rank + 1, bytes);
    unsigned char *to = slot_of(task, group->rank, ticket);
    int code = ah_wait_slot(group, ticket);

    if (code != AH_OK)
        return code;
    ah_tensor_list_copy_in(&task->tensors, at, &group->store, to, own);
    ah_tensor_list_copy_in(&task->tensors, at + next, &group->store, to + next, bytes - next);
    ah_counter_set_lazy(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

/* Reduce `bytes` of all ranks' data at `given`; NULL: this rank's data, still in its tensors. The result is stored to
 * the tensors at `at`, if this rank gets one, and to `result`, if not NULL: to both at once with a victim L3 (2
 * ranks, 256 MiB: 26.7 ms against 29.7), else by a copy (Intel, 64 MiB: 12.3 ms against 14.1). */
static void reduce_blocks(const struct task *task, size_t at, const unsigned char *const *given, unsigned char *result,
                          size_t bytes)
{
    uint32_t ranks = task->group->ranks;
    size_t size = ah_dtype_bytes(task->dtype);
    const void *sources[AH_MAX_RANKS];

    for (size_t done = 0, some; done < bytes; done += some) {
        size_t span;
        unsigned char *mine = ah_tensor_list_at(&task->tensors, at + done, &span),
            *also = result ? result + done : NULL;

        some = ah_min(ah_min(span, BLOCK_BYTES), bytes - done);
        for (uint32_t rank = 0; rank < ranks; rank++)
            sources[rank] = given[rank] ? given[rank] + done : mine;
        if (!task->has_result) {
            ah_reduce(task->dtype, task->reduction, also, sources, ranks, some / size);
        } else if (!also || (task->store_twice && !task->group->store.bypass)) {
            ah_reduce_twice(task->dtype, task->reduction, mine, also, sources, ranks, some / size);
        } else {
            ah_reduce(task->dtype, task->reduction, mine, sources, ranks, some / size);
            ah_nt_store_copy(&task->group->store, also, mine, some);
        }
    }
}

static int reduce_own(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_chunk_bytes(task->bytes, task->chunk, index);
    size_t own = slice(task, group->rank, bytes), next = slice(task, group->rank + 1, bytes);
    const unsigned char *sources[AH_MAX_RANKS];
    int code = ah_wait_all(group, AH_ARRIVED, ticket + 1);

    if (code != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = rank == group->rank ? NULL : slot_of(task, rank, ticket) + own;
    reduce_blocks(task, at + own, sources, slot_of(task, group->rank, ticket) + own, next - own);
    ah_counter_set_lazy(group, AH_REDUCED, ticket + 1);
    return AH_OK;
}

static int copy_out(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_chunk_bytes(task->bytes, task->chunk, index);

    /* Start with the next rank, so that ranks read from different slots. */
    for (uint32_t step = 1; task->has_result && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        size_t own = slice(task, rank, bytes), next = slice(task, rank + 1, bytes);
        int code = ah_wait_counter(group, rank, AH_REDUCED, ticket + 1);

        if (code != AH_OK)
            return code;
        ah_tensor_list_copy_out(&task->tensors, at + own, slot_of(task, rank, ticket) + own, next - own, task->bypass);
    }
    ah_counter_set_lazy(group, AH_CONSUMED, ticket + 1);
    return AH_OK;
}

/* Move all chunks; the first one is copied in already where the pipeline has `begun`. */
static int pipeline(const struct task *task, int begun)
{
    size_t chunks = ah_chunk_count(task->bytes, task->chunk);
    int code = AH_OK;

    for (size_t step = begun ? 1 : 0; code == AH_OK && step < chunks + 2; step++) {
        if (step < chunks)
            code = copy_in(task, step);
        if (code == AH_OK && step >= 1 && step - 1 < chunks)
            code = reduce_own(task, step - 1);
        if (code == AH_OK && step >= 2)
            code = copy_out(task, step - 2);
    }
    return code;
}

/* Where part `part` of `parts` begins in `bytes`: a multiple of `unit`, or the end. */
static size_t part_begin(size_t bytes, uint32_t part, uint32_t parts, size_t unit)
{
    size_t units = (bytes + unit - 1) / unit, each = (units + parts - 1) / parts;

    return ah_min(part * each * unit, bytes);
}

/* The chunks of one thread, see ah_part_work. Part 0 has copied in its first chunk. */
static int chunks_of_part(struct ah_group *view, const void *job, uint32_t part, uint32_t parts)
{
    struct task task = *(const struct task *)job;
    size_t low = part_begin(task.bytes, part, parts, AH_HELPER_SLOT_BYTES);
    int code;

    task.bytes = part_begin(task.bytes, part + 1, parts, AH_HELPER_SLOT_BYTES) - low;
    task.at += low;
    if (part > 0) {
        task.group = view;
        task.first = view->ticket;
        task.chunk = view->slot_bytes;
    }
    code = pipeline(&task, part == 0);
    view->ticket = task.first + (uint32_t)ah_chunk_count(task.bytes, task.chunk);
    ah_wake_waiters(view);
    return code;
}

/* Copy in the first chunk and compare. Sleepers are woken before the copy, because their cores idle until they run (4
 * ranks on 2 cores, 2.4 MiB after a backward pass: 0.97 ms against 1.05). A call that restarts because others
 * announced a window begins one ticket later. */
static int in_chunks(struct task *task, int compared)
{
    int code;

    if (!compared) {
        ah_call_publish(task->group);
        ah_wake_waiters(task->group);
    }
    code = copy_in(task, 0);
    if (code == AH_OK && !compared)
        code = ah_call_compare_all(task->group);
    if (code == AH_OK && !compared && any_window(task->group)) {
        task->first++;
        return in_chunks(task, 1);
    }
    if (code == AH_OK)
        code = ah_run_parts(task->group, chunks_of_part, task, part_count_of(task->group, task->bytes));
    if (code == AH_OK)
        ah_call_end_chunks(task->group, task->group->ticket);
    return code;
}

static int in_one_shot(const struct task *task)
{
    struct ah_group *group = task->group;
    const unsigned char *sources[AH_MAX_RANKS];
    int code = ah_wait_slot(group, task->first);

    if (code != AH_OK)
        return code;
    ah_tensor_list_copy_in(&task->tensors, 0, &group->store, slot_of(task, group->rank, task->first), task->bytes);
    ah_counter_set(group, AH_ARRIVED, task->first + 1);
    ah_call_publish(group);
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = slot_of(task, rank, task->first);
    if (task->has_result)
        reduce_blocks(task, 0, sources, NULL, task->bytes);
    ah_call_end_chunks(group, task->first + 1);
    return AH_OK;
}

/* The same with payloads. A rank without a result does not wait. */
static int from_payloads(const struct task *task)
{
    struct ah_group *group = task->group;
    const unsigned char *sources[AH_MAX_RANKS];
    int code;

    ah_tensor_list_copy_in(&task->tensors, 0, &group->store, ah_payload_of(group, group->rank, task->bytes),
                           task->bytes);
    ah_call_publish(group);
    if (!task->has_result) {
        ah_call_end_uncompared(group);
        return AH_OK;
    }
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = ah_payload_of(group, rank, task->bytes);
    reduce_blocks(task, 0, sources, NULL, task->bytes);
    ah_call_end(group);
    return AH_OK;
}

/* The part of one thread of our slice: reduce it block by block and store it to all ranks' tensors. */
static int blocks_of_part(struct ah_group *view, const void *job, uint32_t part, uint32_t parts)
{
    const struct task *task = job;
    const struct ah_group *group = task->group;
    const struct ah_window *window = task->window;
    size_t own = slice(task, group->rank, task->bytes), bytes = slice(task, group->rank + 1, task->bytes) - own;
    size_t offset = ah_fingerprint_of(group, group->rank)->offset + own, size = ah_dtype_bytes(task->dtype);
    size_t end = part_begin(bytes, part + 1, parts, SLICE_BYTES);
    const void *sources[AH_MAX_RANKS];
    alignas(64) unsigned char block[BLOCK_BYTES];

    (void)view;
    for (size_t at = part_begin(bytes, part, parts, SLICE_BYTES); at < end; at += sizeof block) {
        size_t some = ah_min(sizeof block, end - at);

        for (uint32_t rank = 0; rank < group->ranks; rank++)
            sources[rank] = window->base + rank * window->stride + offset + at;
        ah_reduce(task->dtype, task->reduction, block, sources, group->ranks, some / size);
        for (uint32_t step = 0; step < group->ranks; step++) {
            uint32_t rank = (group->rank + step) % group->ranks;

            ah_copy(window->base + rank * window->stride + offset + at, block, some, 0);
        }
    }
    return AH_OK;
}

/* All tensors are at the same place of the same window: reduce our slice of them in place. */
static int in_window(struct task *task)
{
    struct ah_group *group = task->group;
    int code;

    ah_counter_set(group, AH_ARRIVED, task->first + 1);
    ah_call_publish(group);
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    if (!same_window(group)) {
        task->first++;
        return in_chunks(task, 1);
    }
    if ((code = ah_run_parts(group, blocks_of_part, task, ah_part_count(group, task->bytes))) != AH_OK)
        return code;
    group->window_calls++;
    ah_counter_set(group, AH_REDUCED, task->first + 1);
    if ((code = ah_wait_all(group, AH_REDUCED, task->first + 1)) == AH_OK)
        ah_call_end_chunks(group, task->first + 1);
    return code;
}

static int run(struct ah_group *group, struct ah_call *call, struct ah_tensor_list tensors, int has_result,
               int64_t timeout_ns)
{
    const struct ah_window *window = tensors.number == 1 ? tensors.parts->window : NULL;
    size_t bytes = tensors.ends[tensors.number - 1];
    struct task task = {
        .group = group,
        .tensors = tensors,
        .bytes = bytes,
        .window = window,
        .dtype = call->dtype & ~AH_COMPLEX,
        .reduction = call->reduce,
        .first = group->ticket,
        .chunk = chunk_of(group, bytes),
        .has_result = has_result,
        .store_twice = group->victim_l3,
        .bypass = group->victim_l3 && bytes >= BYPASS_BYTES / group->ranks,
    };
    int one_shot = bytes * group->ranks <= ONE_SHOT_BYTES && bytes <= group->slot_bytes, code;

    call->count = bytes;
    if (!ah_reducible(task.dtype, call->reduce) || group->ranks > AH_MAX_RANKS)
        return AH_INVALID;
    if ((code = ah_call_begin(group, call, 0, 0, timeout_ns)) != AH_OK)
        return code;
    if (one_shot)
        return bytes <= AH_PAYLOAD_BYTES ? from_payloads(&task) : in_one_shot(&task);
    if (!window)
        return in_chunks(&task, 0);
    ah_fingerprint_of(group, group->rank)->window = window->id;
    ah_fingerprint_of(group, group->rank)->offset =
        (uint64_t)(tensors.parts->data - (window->base + group->rank * window->stride));
    return in_window(&task);
}

int ah_all_reduce_list(struct ah_group *group, struct ah_tensor_list tensors, uint32_t dtype, uint32_t reduction,
                         int64_t timeout_ns)
{
    struct ah_call call = {.kind = AH_ALL_REDUCE,
                           .reduce = (uint16_t)reduction,
                           .dtype = (uint16_t)dtype,
                           .root = -1,
                           .list_digest = ah_tensor_list_digest(&tensors)};

    return run(group, &call, tensors, 1, timeout_ns);
}

int ah_all_reduce(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, int64_t timeout_ns)
{
    return ah_all_reduce_list(group, (struct ah_tensor_list){&data, &data.bytes, 1}, dtype, reduction, timeout_ns);
}

int ah_reduce_to_root(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, uint32_t root,
                 int64_t timeout_ns)
{
    struct ah_call call = {
        .kind = AH_REDUCE, .reduce = (uint16_t)reduction, .dtype = (uint16_t)dtype, .root = (int16_t)root};

    return run(group, &call, (struct ah_tensor_list){&data, &data.bytes, 1}, group->rank == root, timeout_ns);
}
