/* all_reduce and reduce. Each chunk is cut into one slice for each rank: a rank copies in all slices but its own,
 * reduces its own from everyone's slots, and copies the others' results out. Up to three chunks are under way at
 * once. A small tensor goes in one piece instead: everyone reads everyone, with a single meeting; what fits beside the call
 * takes no slot. A tensor that lives in a window on every rank is reduced where it is. Large ones are shared between the
 * hands of each rank, where it has some. All of this is done with a bundle: one tensor, or several that are reduced as one.
 *
 * Copies to tensors go past the caches where these do not hold all ranks' tensors, so that a line that was read is gone when its
 * result comes; writing round a cached line takes longer. Those to slots may (store.h). */
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

/* All ranks' data together: below this, reading everything costs less than a second meeting. */
#define ONE_SHOT_BYTES ((size_t)64 << 10)

/* Slices begin on lines of their own. */
#define SLICE_BYTES 64

/* From so many ranks on, all that fits into a slot goes in one piece. */
#define MANY_RANKS 5

/* What is reduced at a time: it stays in the first-level cache until it is stored everywhere. */
#define BLOCK_BYTES ((size_t)16 << 10)

/* All ranks' tensors together: from here on a common third-level cache does not hold them (4 ranks on 2 cores, past the caches and not,
 * 16 MiB: 3.9 and 4.5 ms, 256 MiB: 65 and 84, but 4 MiB: 0.95 and 0.89; 2 ranks, 64 MiB: 6.4 and 6.7, but 8 MiB: 0.60 and 0.53). */
#define PAST_BYTES ((size_t)32 << 20)

struct task {
    struct ah_group *group;
    struct ah_bundle bundle;
    size_t bytes, at; /* of all chunks, and where in the bundle they begin */
    const struct ah_window *window;
    uint32_t dtype, reduction;
    uint32_t first; /* ticket of the first chunk */
    size_t chunk;
    int wants; /* whether this rank gets the result */
    int both;  /* whether a result is stored in both places at once, if they are near */
    int past;  /* whether what is copied out goes past the caches */
};

/* After the meeting: whether anyone announced a window, so that this ticket carries no data of its own. */
static int somewhere(const struct ah_group *group)
{
    for (uint32_t rank = 0; group->windows_made && rank < group->ranks; rank++) {
        if (ah_card_of(group, rank)->window != 0)
            return 1;
    }
    return 0;
}

/* After the meeting: whether everyone announced the same place. */
static int everywhere(const struct ah_group *group)
{
    const struct ah_card *mine = ah_card_of(group, group->rank);

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        const struct ah_card *theirs = ah_card_of(group, rank);

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

/* What goes in one piece: more meetings would cost more than they gain. */
static size_t whole_of(const struct ah_group *group)
{
    return group->ranks >= MANY_RANKS ? group->slot_bytes : ah_min(group->slot_bytes, AH_CHUNK_BYTES);
}

/* How many hands of each rank share `bytes`. */
static uint32_t parts_of(const struct ah_group *group, size_t bytes)
{
    return bytes <= whole_of(group) ? 1 : ah_parts(group, bytes);
}

/* The bytes of a chunk, out of `bytes`. Smaller ones cost meetings, which are changes of rank where ranks outnumber the cores (4 ranks
 * on 2 cores, 256 MiB: 88 ms, against 119 in chunks of 128 KiB and 96 in 256 KiB; 2 ranks, 1 MiB: 54 us, against 65 and 58), and
 * larger ones leave the second-level cache (113 ms in chunks of 1 MiB). What hands share is cut where chunks of theirs end. */
static size_t chunk_of(const struct ah_group *group, size_t bytes)
{
    if (bytes <= whole_of(group))
        return group->slot_bytes;
    return ah_min(group->slot_bytes, parts_of(group, bytes) > 1 ? AH_HAND_SLOT : AH_CHUNK_BYTES);
}

/* Where the chunk of `rank` stands. */
static unsigned char *place(const struct task *task, uint32_t rank, uint32_t ticket)
{
    size_t bytes = ah_min(task->chunk, task->bytes);

    return ah_slot_at(task->group, rank, ticket, bytes, bytes);
}

static int copy_in(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_span(task->bytes, task->chunk, index);
    size_t own = slice(task, group->rank, bytes), next = slice(task, group->rank + 1, bytes);
    unsigned char *to = place(task, group->rank, ticket);
    int code = ah_await_slot(group, ticket);

    if (code != AH_OK)
        return code;
    ah_bundle_get(&task->bundle, at, &group->store, to, own);
    ah_bundle_get(&task->bundle, at + next, &group->store, to + next, bytes - next);
    ah_post_later(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

/* Reduce `bytes` of everyone's, which are at `given`, NULL for those of this rank that are still in the bundle. The result goes
 * to the bundle from `at` on, if this rank gets one, and to `result`, if that is a place: to both at once where slots are swift (2 ranks,
 * 256 MiB: 26.7 ms, against 29.7), else from one to the other (Intel's, 64 MiB: 12.3 ms, against 14.1). */
static void reduce_some(const struct task *task, size_t at, const unsigned char *const *given, unsigned char *result,
                        size_t bytes)
{
    uint32_t ranks = task->group->ranks;
    size_t size = ah_dtype_bytes(task->dtype);
    const void *sources[AH_MOST_RANKS];

    for (size_t done = 0, some; done < bytes; done += some) {
        size_t span;
        unsigned char *mine = ah_bundle_place(&task->bundle, at + done, &span), *also = result ? result + done : NULL;

        some = ah_min(ah_min(span, BLOCK_BYTES), bytes - done);
        for (uint32_t rank = 0; rank < ranks; rank++)
            sources[rank] = given[rank] ? given[rank] + done : mine;
        if (!task->wants) {
            ah_reduce(task->dtype, task->reduction, also, sources, ranks, some / size);
        } else if (!also || (task->both && !task->group->store.past)) {
            ah_reduce_twice(task->dtype, task->reduction, mine, also, sources, ranks, some / size);
        } else {
            ah_reduce(task->dtype, task->reduction, mine, sources, ranks, some / size);
            ah_fill(&task->group->store, also, mine, some);
        }
    }
}

static int reduce_own(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_span(task->bytes, task->chunk, index);
    size_t own = slice(task, group->rank, bytes), next = slice(task, group->rank + 1, bytes);
    const unsigned char *sources[AH_MOST_RANKS];
    int code = ah_await_all(group, AH_ARRIVED, ticket + 1);

    if (code != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = rank == group->rank ? NULL : place(task, rank, ticket) + own;
    reduce_some(task, at + own, sources, place(task, group->rank, ticket) + own, next - own);
    ah_post_later(group, AH_REDUCED, ticket + 1);
    return AH_OK;
}

static int copy_out(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = task->at + index * task->chunk, bytes = ah_span(task->bytes, task->chunk, index);

    /* Beginning with the next rank spreads who reads from whom. */
    for (uint32_t step = 1; task->wants && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        size_t own = slice(task, rank, bytes), next = slice(task, rank + 1, bytes);
        int code = ah_await(group, rank, AH_REDUCED, ticket + 1);

        if (code != AH_OK)
            return code;
        ah_bundle_put(&task->bundle, at + own, place(task, rank, ticket) + own, next - own, task->past);
    }
    ah_post_later(group, AH_TAKEN, ticket + 1);
    return AH_OK;
}

/* Move all chunks; the first one is copied in already where the pipeline has `begun`. */
static int pipeline(const struct task *task, int begun)
{
    size_t chunks = ah_chunks(task->bytes, task->chunk);
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

/* Where part `part` of `parts` begins in `bytes`: on a multiple of `unit`, but for the end of the last. */
static size_t cut(size_t bytes, uint32_t part, uint32_t parts, size_t unit)
{
    size_t units = (bytes + unit - 1) / unit, each = (units + parts - 1) / parts;

    return ah_min(part * each * unit, bytes);
}

/* The chunks of one hand, see ah_handwork. Those of the caller have begun. */
static int some_chunks(struct ah_group *view, const void *job, uint32_t part, uint32_t parts)
{
    struct task task = *(const struct task *)job;
    size_t low = cut(task.bytes, part, parts, AH_HAND_SLOT);
    int code;

    task.bytes = cut(task.bytes, part + 1, parts, AH_HAND_SLOT) - low;
    task.at += low;
    if (part > 0) {
        task.group = view;
        task.first = view->ticket;
        task.chunk = view->slot_bytes;
    }
    code = pipeline(&task, part == 0);
    view->ticket = task.first + (uint32_t)ah_chunks(task.bytes, task.chunk);
    ah_ring_waiters(view);
    return code;
}

/* Copy in the first chunk and meet. Whoever comes last tells those who sleep before it copies, because their cores are idle until they
 * run (4 ranks on 2 cores, 2.4 MiB after a backward pass: 0.97 ms, against 1.05). What begins again because others announced a window
 * starts one ticket later. */
static int in_chunks(struct task *task, int met)
{
    int code;

    if (!met) {
        ah_publish(task->group);
        ah_ring_waiters(task->group);
    }
    code = copy_in(task, 0);
    if (code == AH_OK && !met)
        code = ah_meet(task->group);
    if (code == AH_OK && !met && somewhere(task->group)) {
        task->first++;
        return in_chunks(task, 1);
    }
    if (code == AH_OK)
        code = ah_share(task->group, some_chunks, task, parts_of(task->group, task->bytes));
    if (code == AH_OK)
        ah_finish(task->group, task->group->ticket);
    return code;
}

static int in_one_shot(const struct task *task)
{
    struct ah_group *group = task->group;
    const unsigned char *sources[AH_MOST_RANKS];
    int code = ah_await_slot(group, task->first);

    if (code != AH_OK)
        return code;
    ah_bundle_get(&task->bundle, 0, &group->store, place(task, group->rank, task->first), task->bytes);
    ah_post(group, AH_ARRIVED, task->first + 1);
    ah_publish(group);
    if ((code = ah_meet(group)) != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = place(task, rank, task->first);
    if (task->wants)
        reduce_some(task, 0, sources, NULL, task->bytes);
    ah_finish(group, task->first + 1);
    return AH_OK;
}

/* The same beside the call. Who gets no result waits for nobody. */
static int beside(const struct task *task)
{
    struct ah_group *group = task->group;
    const unsigned char *sources[AH_MOST_RANKS];
    int code;

    ah_bundle_get(&task->bundle, 0, &group->store, ah_beside(group, group->rank, task->bytes), task->bytes);
    ah_publish(group);
    if (!task->wants) {
        ah_leave(group);
        return AH_OK;
    }
    if ((code = ah_meet(group)) != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = ah_beside(group, rank, task->bytes);
    reduce_some(task, 0, sources, NULL, task->bytes);
    ah_close(group);
    return AH_OK;
}

/* What one hand reduces of our slice of everyone's tensors, a block at a time, and stores to all of them. */
static int some_blocks(struct ah_group *view, const void *job, uint32_t part, uint32_t parts)
{
    const struct task *task = job;
    const struct ah_group *group = task->group;
    const struct ah_window *window = task->window;
    size_t own = slice(task, group->rank, task->bytes), bytes = slice(task, group->rank + 1, task->bytes) - own;
    size_t offset = ah_card_of(group, group->rank)->offset + own, size = ah_dtype_bytes(task->dtype);
    size_t end = cut(bytes, part + 1, parts, SLICE_BYTES);
    const void *sources[AH_MOST_RANKS];
    alignas(64) unsigned char block[BLOCK_BYTES];

    (void)view;
    for (size_t at = cut(bytes, part, parts, SLICE_BYTES); at < end; at += sizeof block) {
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

/* Everyone's tensor is at the same place of the same window: reduce our slice of all of them where they are. */
static int in_window(struct task *task)
{
    struct ah_group *group = task->group;
    int code;

    ah_post(group, AH_ARRIVED, task->first + 1);
    ah_publish(group);
    if ((code = ah_meet(group)) != AH_OK)
        return code;
    if (!everywhere(group)) {
        task->first++;
        return in_chunks(task, 1);
    }
    if ((code = ah_share(group, some_blocks, task, ah_parts(group, task->bytes))) != AH_OK)
        return code;
    group->direct++;
    ah_post(group, AH_REDUCED, task->first + 1);
    if ((code = ah_await_all(group, AH_REDUCED, task->first + 1)) == AH_OK)
        ah_finish(group, task->first + 1);
    return code;
}

static int run(struct ah_group *group, struct ah_call *call, struct ah_bundle bundle, int wants, int64_t timeout_ns)
{
    const struct ah_window *window = bundle.number == 1 ? bundle.parts->window : NULL;
    size_t bytes = bundle.ends[bundle.number - 1];
    struct task task = {
        .group = group,
        .bundle = bundle,
        .bytes = bytes,
        .window = window,
        .dtype = call->dtype & ~AH_COMPLEX,
        .reduction = call->reduce,
        .first = group->ticket,
        .chunk = chunk_of(group, bytes),
        .wants = wants,
        .both = group->swift,
        .past = group->swift && bytes >= PAST_BYTES / group->ranks,
    };
    int one_shot = bytes * group->ranks <= ONE_SHOT_BYTES && bytes <= group->slot_bytes, code;

    call->count = bytes;
    if (!ah_reducible(task.dtype, call->reduce) || group->ranks > AH_MOST_RANKS)
        return AH_INVALID;
    if ((code = ah_begin(group, call, 0, 0, timeout_ns)) != AH_OK)
        return code;
    if (one_shot)
        return bytes <= AH_SHEET_BYTES ? beside(&task) : in_one_shot(&task);
    if (!window)
        return in_chunks(&task, 0);
    ah_card_of(group, group->rank)->window = window->id;
    ah_card_of(group, group->rank)->offset = (uint64_t)(bundle.parts->data - (window->base + group->rank * window->stride));
    return in_window(&task);
}

int ah_all_reduce_bundle(struct ah_group *group, struct ah_bundle bundle, uint32_t dtype, uint32_t reduction,
                         int64_t timeout_ns)
{
    struct ah_call call = {.kind = AH_ALL_REDUCE,
                           .reduce = (uint16_t)reduction,
                           .dtype = (uint16_t)dtype,
                           .root = ah_bundle_digest(&bundle)};

    return run(group, &call, bundle, 1, timeout_ns);
}

int ah_all_reduce(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, int64_t timeout_ns)
{
    return ah_all_reduce_bundle(group, (struct ah_bundle){&data, &data.bytes, 1}, dtype, reduction, timeout_ns);
}

int ah_reduce_to(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t reduction, uint32_t root,
                 int64_t timeout_ns)
{
    struct ah_call call = {
        .kind = AH_REDUCE, .reduce = (uint16_t)reduction, .dtype = (uint16_t)dtype, .root = (int16_t)root};

    return run(group, &call, (struct ah_bundle){&data, &data.bytes, 1}, group->rank == root, timeout_ns);
}
