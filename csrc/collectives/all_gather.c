/* all_gather and gather: each rank copies its part into slots, and the receivers copy all parts out; or they read
 * them by single copy. Small parts are in the payloads. */
#include "shm/fingerprint.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/part_sizes.h"
#include "shm/wait.h"

struct task {
    struct ah_group *group;
    struct ah_part in;
    const struct ah_part *out; /* NULL where this rank receives nothing */
    int32_t root;
    int staged; /* all data goes through the slots, whatever its size */
    uint32_t first;
    size_t chunk;
};

/* The parts whose sizes we publish; NULL: our part, for all ranks. */
static const struct ah_part *stated(const struct task *task)
{
    return task->root >= 0 ? task->out : NULL;
}

static int copy_in(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t bytes = ah_chunk_bytes(task->in.bytes, task->chunk, index);
    int code = ah_wait_slot(group, ticket), read = 0;

    if (code != AH_OK)
        return code;
    if (index == 0 && !task->staged) {
        ah_write_part_table(group, ticket, stated(task), task->in);
        read = ah_uses_single_copy(group, ah_largest_part(group, stated(task), task->in));
    }
    if (!read)
        ah_nt_store_copy(&group->store, ah_slot_after_table(group, group->rank, ticket),
                         task->in.data + index * task->chunk, bytes);
    ah_counter_set(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

static int copy_out(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;

    for (uint32_t step = 0; task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        const struct ah_part *out = &task->out[rank];
        size_t at = index * task->chunk, bytes = ah_chunk_bytes(out->bytes, task->chunk, index);
        const unsigned char *from = rank == group->rank ? task->in.data + at : ah_slot_after_table(group, rank, ticket);
        int code = rank == group->rank ? AH_OK : ah_wait_counter(group, rank, AH_ARRIVED, ticket + 1);

        if (code != AH_OK)
            return code;
        if (from != out->data + at)
            ah_copy(out->data + at, from, bytes, out->bytes >= AH_BYPASS_BYTES);
    }
    ah_counter_set(group, AH_CONSUMED, ticket + 1);
    return AH_OK;
}

/* Read all parts by single copy. */
static int single_copy(const struct task *task)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    for (uint32_t step = 0; code == AH_OK && task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        const struct ah_part *out = &task->out[rank];

        if (rank != group->rank)
            code = ah_single_copy_read(group, rank, out->data, ah_part_address(group, task->first, rank), out->bytes);
        else if (out->data != task->in.data)
            ah_copy(out->data, task->in.data, out->bytes, out->bytes >= AH_BYPASS_BYTES);
    }
    return code;
}

/* Whether all parts that this rank knows of fit into a payload. */
static int fits_payload(const struct task *task)
{
    for (uint32_t rank = 0; task->out && rank < task->group->ranks; rank++) {
        if (task->out[rank].bytes > AH_PAYLOAD_BYTES)
            return 0;
    }
    return task->in.bytes <= AH_PAYLOAD_BYTES;
}

/* All parts are in the payloads. */
static int from_payloads(const struct task *task)
{
    struct ah_group *group = task->group;

    for (uint32_t rank = 0; task->out && rank < group->ranks; rank++) {
        if (task->out[rank].bytes != ah_fingerprint_of(group, rank)->bytes)
            return ah_call_mismatch(group, rank);
    }
    for (uint32_t rank = 0; task->out && rank < group->ranks; rank++) {
        const struct ah_part *out = &task->out[rank];

        if (rank != group->rank || out->data != task->in.data)
            ah_copy(out->data, ah_payload_of(group, rank, out->bytes), out->bytes, 0);
    }
    ah_call_end(group);
    return AH_OK;
}

/* All fingerprints are compared, and the first chunk of each rank is in its slot. */
static int through_slots(struct task *task)
{
    struct ah_group *group = task->group;
    size_t chunks;
    int code = task->root < 0 ? ah_compare_part_sizes(group, task->first, task->out)
                              : ah_compare_root_sizes(group, task->first, (uint32_t)task->root, task->in.bytes);

    if (code != AH_OK)
        return code;
    chunks = ah_chunk_count(ah_largest_of_all(group), task->chunk);
    if (ah_any_single_copy(group)) {
        /* If another part is too large for single copy, all data goes through the slots. */
        code = AH_NOT_READ;
        if (ah_uses_single_copy(group, ah_largest_of_all(group)))
            code = ah_single_copy_finish(group, task->first, single_copy(task));
        task->first++;
        task->staged = 1;
        if (code == AH_NOT_READ)
            code = copy_in(task, 0);
        else
            chunks = 0;
    }
    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        if (index + 1 < chunks)
            code = copy_in(task, index + 1);
        if (code == AH_OK)
            code = copy_out(task, index);
    }
    if (code == AH_OK)
        ah_call_end_chunks(group, task->first + (uint32_t)chunks);
    return code;
}

static int run(struct ah_group *group, const struct ah_call *call, struct ah_part in, const struct ah_part *out,
               int64_t timeout_ns)
{
    struct task task = {.group = group, .in = in, .out = out, .root = call->root, .first = group->ticket};
    size_t slot = group->slot_bytes, table = ah_part_table_bytes(group);
    size_t largest = ah_largest_part(group, stated(&task), in);
    int small = fits_payload(&task), code;

    if (slot <= table)
        return AH_INVALID;
    /* The chunk size must be the same on every rank, whatever its part's size. */
    task.chunk = ah_min(slot - table, AH_CHUNK_BYTES / 2);
    if ((code = ah_call_begin(group, call, small ? (uint32_t)in.bytes : AH_NO_PAYLOAD, largest, timeout_ns)) != AH_OK)
        return code;
    if (small)
        ah_copy(ah_payload_of(group, group->rank, in.bytes), in.data, in.bytes, 0);
    else if ((code = copy_in(&task, 0)) != AH_OK)
        return code;
    ah_call_publish(group);
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    if (!ah_any_without_payload(group))
        return from_payloads(&task);
    if (small)
        code = copy_in(&task, 0);
    if (code == AH_OK && ah_any_payload(group))
        code = ah_wait_all(group, AH_ARRIVED, task.first + 1);
    return code == AH_OK ? through_slots(&task) : code;
}

int ah_all_gather(struct ah_group *group, struct ah_part in, const struct ah_part *out, uint32_t dtype,
                  int64_t timeout_ns)
{
    const struct ah_call call = {.kind = AH_ALL_GATHER, .dtype = (uint16_t)dtype, .root = -1};

    return run(group, &call, in, out, timeout_ns);
}

int ah_gather(struct ah_group *group, struct ah_part in, const struct ah_part *out, uint32_t dtype, uint32_t root,
              int64_t timeout_ns)
{
    const struct ah_call call = {.kind = AH_GATHER, .dtype = (uint16_t)dtype, .root = (int16_t)root};

    if (root >= group->ranks)
        return AH_INVALID;
    return run(group, &call, in, group->rank == root ? out : NULL, timeout_ns);
}
