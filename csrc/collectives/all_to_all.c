/* all_to_all and scatter: a slot has one piece for each rank, which that rank copies out, or reads by single copy.
 * Small equal parts are in the payloads; the root of a scatter does not wait then. */
#include "shm/fingerprint.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/part_sizes.h"
#include "shm/wait.h"

struct task {
    struct ah_group *group;
    const struct ah_part *in;  /* NULL where this rank sends nothing */
    const struct ah_part *out; /* from each rank; NULL with a root, which sends `only` */
    struct ah_part only;
    int32_t root;
    int staged; /* all data goes through the slots, whatever its size */
    uint32_t first;
    size_t piece;
};

static int copy_in(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    unsigned char *to = ah_slot_after_table(group, group->rank, ticket);
    int code = ah_wait_slot(group, ticket), read = 0;

    if (code != AH_OK)
        return code;
    if (index == 0 && !task->staged) {
        ah_write_part_table(group, ticket, task->in, task->only);
        read = ah_uses_single_copy(group, ah_largest_part(group, task->in, task->only));
    }
    for (uint32_t rank = 0; task->in && !read && rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_nt_store_copy(&group->store, to + rank * task->piece, task->in[rank].data + index * task->piece,
                             ah_chunk_bytes(task->in[rank].bytes, task->piece, index));
    }
    ah_counter_set(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

static int copy_out_from(const struct task *task, size_t index, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = index * task->piece;
    const unsigned char *from = ah_slot_after_table(group, rank, ticket) + group->rank * task->piece;
    int code = rank == group->rank ? AH_OK : ah_wait_counter(group, rank, AH_ARRIVED, ticket + 1);

    if (code != AH_OK)
        return code;
    if (rank == group->rank)
        from = task->in[rank].data + at;
    if (from != out.data + at)
        ah_copy(out.data + at, from, ah_chunk_bytes(out.bytes, task->piece, index), out.bytes >= AH_BYPASS_BYTES);
    return AH_OK;
}

static int copy_out(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    if (task->root >= 0)
        code = copy_out_from(task, index, (uint32_t)task->root, task->only);
    for (uint32_t step = 0; code == AH_OK && task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;

        code = copy_out_from(task, index, rank, task->out[rank]);
    }
    if (code == AH_OK)
        ah_counter_set(group, AH_CONSUMED, task->first + (uint32_t)index + 1);
    return code;
}

static int read_from(const struct task *task, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;

    if (rank != group->rank)
        return ah_single_copy_read(group, rank, out.data, ah_part_address(group, task->first, rank), out.bytes);
    if (out.data != task->in[rank].data)
        ah_copy(out.data, task->in[rank].data, out.bytes, out.bytes >= AH_BYPASS_BYTES);
    return AH_OK;
}

/* Read all ranks' parts for us by single copy. */
static int single_copy(const struct task *task)
{
    uint32_t self = task->group->rank, ranks = task->group->ranks;
    int code = AH_OK;

    if (task->root >= 0)
        return read_from(task, (uint32_t)task->root, task->only);
    for (uint32_t step = 0; code == AH_OK && step < ranks; step++)
        code = read_from(task, (self + step) % ranks, task->out[(self + step) % ranks]);
    return code;
}

/* Size of each part if all are equal and fit into a payload, else AH_NO_PAYLOAD. */
static uint32_t payload_bytes(const struct task *task)
{
    size_t bytes = task->root < 0 ? task->out[0].bytes : task->only.bytes;

    if (bytes * task->group->ranks > AH_PAYLOAD_BYTES)
        return AH_NO_PAYLOAD;
    for (uint32_t rank = 0; rank < task->group->ranks; rank++) {
        if ((task->in && task->in[rank].bytes != bytes) || (task->out && task->out[rank].bytes != bytes))
            return AH_NO_PAYLOAD;
    }
    return (uint32_t)bytes;
}

static void copy_in_payload(const struct task *task, size_t bytes)
{
    struct ah_group *group = task->group;
    unsigned char *to = ah_payload_of(group, group->rank, bytes * group->ranks);

    /* Our own part is copied directly. */
    for (uint32_t rank = 0; task->in && rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_copy(to + rank * bytes, task->in[rank].data, bytes, 0);
    }
}

/* Copy our part out of the payload of `rank`. */
static void copy_out_payload(const struct task *task, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;

    if (rank != group->rank)
        ah_copy(out.data, ah_payload_of(group, rank, out.bytes * group->ranks) + group->rank * out.bytes, out.bytes, 0);
    else if (out.data != task->in[rank].data)
        ah_copy(out.data, task->in[rank].data, out.bytes, 0);
}

/* All parts are in the payloads. */
static int exchange(const struct task *task)
{
    struct ah_group *group = task->group;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (task->out[rank].bytes != ah_fingerprint_of(group, rank)->bytes)
            return ah_call_mismatch(group, rank);
    }
    /* Our own part first: the result of another rank may overwrite it. */
    for (uint32_t step = 0; step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;

        copy_out_payload(task, rank, task->out[rank]);
    }
    ah_call_end(group);
    return AH_OK;
}

/* The root's parts are in its payload, or `bytes` is set to AH_NO_PAYLOAD. */
static int copy_out_scattered(const struct task *task, uint32_t *bytes)
{
    struct ah_group *group = task->group;
    uint32_t root = (uint32_t)task->root;
    int code = AH_OK;

    if (group->rank != root)
        code = ah_call_compare_one(group, root);
    if (code != AH_OK)
        return code;
    *bytes = ah_fingerprint_of(group, root)->bytes;
    if (*bytes == AH_NO_PAYLOAD)
        return AH_OK;
    if (*bytes != task->only.bytes)
        return ah_call_mismatch(group, group->rank);
    copy_out_payload(task, root, task->only);
    if (group->rank == root)
        ah_call_end_uncompared(group);
    else
        ah_call_end(group);
    return AH_OK;
}

/* All fingerprints are compared, and the first chunk of each rank is in its slot. */
static int through_slots(struct task *task)
{
    struct ah_group *group = task->group;
    size_t chunks;
    int code = task->root < 0 ? ah_compare_part_sizes(group, task->first, task->out)
                              : ah_compare_root_sizes(group, task->first, (uint32_t)task->root, task->only.bytes);

    if (code != AH_OK)
        return code;
    chunks = ah_chunk_count(ah_largest_of_all(group), task->piece);
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

static int run(struct task *task, const struct ah_call *call, int64_t timeout_ns)
{
    struct ah_group *group = task->group;
    size_t slot = group->slot_bytes, table = ah_part_table_bytes(group);
    uint32_t bytes = payload_bytes(task), theirs = AH_NO_PAYLOAD;
    int code;

    task->first = group->ticket;
    if (slot < table + group->ranks * AH_ALIGN)
        return AH_INVALID;
    task->piece = ah_min(slot - table, AH_CHUNK_BYTES) / group->ranks / AH_ALIGN * AH_ALIGN;
    if ((code = ah_call_begin(group, call, bytes, ah_largest_part(group, task->in, task->only), timeout_ns)) != AH_OK)
        return code;
    if (bytes != AH_NO_PAYLOAD)
        copy_in_payload(task, bytes);
    else if ((code = copy_in(task, 0)) != AH_OK)
        return code;
    ah_call_publish(group);
    if (bytes != AH_NO_PAYLOAD && task->root >= 0 &&
        ((code = copy_out_scattered(task, &theirs)) != AH_OK || theirs != AH_NO_PAYLOAD))
        return code;
    if ((code = ah_call_compare_all(group)) != AH_OK)
        return code;
    if (task->root < 0 && !ah_any_without_payload(group))
        return exchange(task);
    /* A root that has its parts in its payload does not use the slots: its parts are smaller than ours. */
    if (task->root >= 0 && ah_fingerprint_of(group, (uint32_t)task->root)->bytes != AH_NO_PAYLOAD)
        return ah_call_mismatch(group, group->rank);
    if (bytes != AH_NO_PAYLOAD)
        code = copy_in(task, 0);
    if (code == AH_OK && ah_any_payload(group))
        code = ah_wait_all(group, AH_ARRIVED, task->first + 1);
    return code == AH_OK ? through_slots(task) : code;
}

int ah_all_to_all(struct ah_group *group, const struct ah_part *in, const struct ah_part *out, uint32_t dtype,
                  int64_t timeout_ns)
{
    const struct ah_call call = {.kind = AH_ALL_TO_ALL, .dtype = (uint16_t)dtype, .root = -1};
    struct task task = {.group = group, .in = in, .out = out, .root = -1};

    return run(&task, &call, timeout_ns);
}

int ah_scatter(struct ah_group *group, const struct ah_part *in, struct ah_part out, uint32_t dtype, uint32_t root,
               int64_t timeout_ns)
{
    const struct ah_call call = {.kind = AH_SCATTER, .dtype = (uint16_t)dtype, .root = (int16_t)root};
    struct task task = {.group = group, .in = group->rank == root ? in : NULL, .only = out, .root = (int32_t)root};

    if (root >= group->ranks)
        return AH_INVALID;
    return run(&task, &call, timeout_ns);
}
