/* reduce_scatter: a slot has one piece for each rank, which that rank reduces from all slots. Small tensors are in
 * the payloads in the same order. */
#include "shm/fingerprint.h"
#include "collectives/collective.h"
#include "shm/copy.h"
#include "shm/reduce.h"
#include "shm/cico_slot.h"
#include "shm/wait.h"

struct task {
    struct ah_group *group;
    const struct ah_part *in;
    struct ah_part out;
    uint32_t dtype, reduction, first;
    size_t piece;
};

/* The slot of `rank`, with its pieces for all ranks. */
static unsigned char *slot_of(const struct task *task, uint32_t rank, uint32_t ticket)
{
    size_t bytes = task->group->ranks * task->piece;

    return ah_cico_slot_at(task->group, rank, ticket, bytes, bytes);
}

static int copy_in(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    unsigned char *to = slot_of(task, group->rank, ticket);
    size_t bytes = ah_chunk_bytes(task->out.bytes, task->piece, index);
    int code = ah_wait_slot(group, ticket);

    if (code != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_nt_store_copy(&group->store, to + rank * task->piece, task->in[rank].data + index * task->piece, bytes);
    }
    ah_counter_set(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

static int reduce_own(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t bytes = ah_chunk_bytes(task->out.bytes, task->piece, index), at = index * task->piece;
    const void *sources[AH_MAX_RANKS];
    int code;

    if (index == 0)
        ah_call_publish(group);
    code = index == 0 ? ah_call_compare_all(group) : ah_wait_all(group, AH_ARRIVED, ticket + 1);
    if (code != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = rank == group->rank ? task->in[rank].data + at
                                            : slot_of(task, rank, ticket) + group->rank * task->piece;
    ah_reduce(task->dtype, task->reduction, task->out.data + at, sources, group->ranks,
              bytes / ah_dtype_bytes(task->dtype));
    ah_counter_set(group, AH_CONSUMED, ticket + 1);
    return AH_OK;
}

static int from_payloads(const struct task *task)
{
    struct ah_group *group = task->group;
    size_t bytes = task->out.bytes, all = bytes * group->ranks;
    unsigned char *to = ah_payload_of(group, group->rank, all);
    const void *sources[AH_MAX_RANKS];
    int code;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_copy(to + rank * bytes, task->in[rank].data, bytes, 0);
    }
    ah_call_publish(group);
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    for (uint32_t rank = 0; rank < group->ranks; rank++)
        sources[rank] = rank == group->rank ? task->in[rank].data
                                            : ah_payload_of(group, rank, all) + group->rank * bytes;
    ah_reduce(task->dtype, task->reduction, task->out.data, sources, group->ranks, bytes / ah_dtype_bytes(task->dtype));
    ah_call_end(group);
    return AH_OK;
}

int ah_reduce_scatter(struct ah_group *group, const struct ah_part *in, struct ah_part out, uint32_t dtype,
                      uint32_t reduction, int64_t timeout_ns)
{
    const struct ah_call call = {
        .count = out.bytes, .kind = AH_REDUCE_SCATTER, .reduce = (uint16_t)reduction, .dtype = (uint16_t)dtype,
        .root = -1};
    struct task task = {
        .group = group, .in = in, .out = out, .dtype = dtype & ~AH_COMPLEX, .reduction = reduction,
        .first = group->ticket};
    size_t slot = group->slot_bytes, chunks;
    int code;

    if (!ah_reducible(task.dtype, reduction) || group->ranks > AH_MAX_RANKS || slot < (size_t)group->ranks * AH_ALIGN)
        return AH_INVALID;
    /* Up to a whole slot is one chunk. */
    task.piece = slot / group->ranks / AH_ALIGN * AH_ALIGN;
    if (out.bytes > task.piece && slot > AH_CHUNK_BYTES)
        task.piece = AH_CHUNK_BYTES / group->ranks / AH_ALIGN * AH_ALIGN;
    task.piece = ah_min(task.piece, (out.bytes + AH_ALIGN - 1) / AH_ALIGN * AH_ALIGN);
    chunks = ah_chunk_count(out.bytes, task.piece);
    code = ah_call_begin(group, &call, 0, 0, timeout_ns);
    if (code == AH_OK && out.bytes * group->ranks <= AH_PAYLOAD_BYTES)
        return from_payloads(&task);
    for (size_t step = 0; code == AH_OK && step < chunks + 1; step++) {
        if (step < chunks)
            code = copy_in(&task, step);
        if (code == AH_OK && step >= 1)
            code = reduce_own(&task, step - 1);
    }
    if (code == AH_OK)
        ah_call_end_chunks(group, task.first + (uint32_t)chunks);
    return code;
}
