/* all_gather and gather: a rank copies in its own, whoever wants it copies everyone's out; or reads it where it is. What
 * fits beside the call stands there. */
#include "shm/fingerprint.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/part_sizes.h"
#include "shm/wait.h"

struct task {
    struct ah_group *group;
    struct ah_part in;
    const struct ah_part *out; /* NULL where this rank takes nothing */
    int32_t root;
    int staged; /* all goes through the slots, whatever its size */
    uint32_t first;
    size_t chunk;
};

/* What we state for each rank; NULL: our part, for all. */
static const struct ah_part *stated(const struct task *task)
{
    return task->root >= 0 ? task->out : NULL;
}

static int give(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t bytes = ah_span(task->in.bytes, task->chunk, index);
    int code = ah_await_slot(group, ticket), read = 0;

    if (code != AH_OK)
        return code;
    if (index == 0 && !task->staged) {
        ah_state_parts(group, ticket, stated(task), task->in);
        read = ah_reaches(group, ah_largest_part(group, stated(task), task->in));
    }
    if (!read)
        ah_fill(&group->store, ah_parts_at(group, group->rank, ticket), task->in.data + index * task->chunk, bytes);
    ah_post(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

static int take(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;

    for (uint32_t step = 0; task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        const struct ah_part *out = &task->out[rank];
        size_t at = index * task->chunk, bytes = ah_span(out->bytes, task->chunk, index);
        const unsigned char *from = rank == group->rank ? task->in.data + at : ah_parts_at(group, rank, ticket);
        int code = rank == group->rank ? AH_OK : ah_await(group, rank, AH_ARRIVED, ticket + 1);

        if (code != AH_OK)
            return code;
        if (from != out->data + at)
            ah_copy(out->data + at, from, bytes, out->bytes >= AH_STREAM_BYTES);
    }
    ah_post(group, AH_TAKEN, ticket + 1);
    return AH_OK;
}

/* Read everyone's where it is. */
static int fetch(const struct task *task)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    for (uint32_t step = 0; code == AH_OK && task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;
        const struct ah_part *out = &task->out[rank];

        if (rank != group->rank)
            code = ah_reach(group, rank, out->data, ah_stated_address(group, task->first, rank), out->bytes);
        else if (out->data != task->in.data)
            ah_copy(out->data, task->in.data, out->bytes, out->bytes >= AH_STREAM_BYTES);
    }
    return code;
}

/* Whether all that this rank knows of fits beside a call. */
static int fits(const struct task *task)
{
    for (uint32_t rank = 0; task->out && rank < task->group->ranks; rank++) {
        if (task->out[rank].bytes > AH_SHEET_BYTES)
            return 0;
    }
    return task->in.bytes <= AH_SHEET_BYTES;
}

/* Everyone's is beside the call. */
static int beside(const struct task *task)
{
    struct ah_group *group = task->group;

    for (uint32_t rank = 0; task->out && rank < group->ranks; rank++) {
        if (task->out[rank].bytes != ah_card_of(group, rank)->bytes)
            return ah_differ(group, rank);
    }
    for (uint32_t rank = 0; task->out && rank < group->ranks; rank++) {
        const struct ah_part *out = &task->out[rank];

        if (rank != group->rank || out->data != task->in.data)
            ah_copy(out->data, ah_beside(group, rank, out->bytes), out->bytes, 0);
    }
    ah_close(group);
    return AH_OK;
}

/* Everyone has met, and the first chunk of all stands in the slots. */
static int through_slots(struct task *task)
{
    struct ah_group *group = task->group;
    size_t chunks;
    int code = task->root < 0 ? ah_check_sizes(group, task->first, task->out)
                              : ah_check_root(group, task->first, (uint32_t)task->root, task->in.bytes);

    if (code != AH_OK)
        return code;
    chunks = ah_chunks(ah_largest(group), task->chunk);
    if (ah_someone_reaches(group)) {
        /* Where another's part is too large for it, all goes through the slots. */
        code = ah_reaches(group, ah_largest(group)) ? ah_reached(group, task->first, fetch(task)) : AH_UNREACHED;
        task->first++;
        task->staged = 1;
        if (code == AH_UNREACHED)
            code = give(task, 0);
        else
            chunks = 0;
    }
    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        if (index + 1 < chunks)
            code = give(task, index + 1);
        if (code == AH_OK)
            code = take(task, index);
    }
    if (code == AH_OK)
        ah_finish(group, task->first + (uint32_t)chunks);
    return code;
}

static int run(struct ah_group *group, const struct ah_call *call, struct ah_part in, const struct ah_part *out,
               int64_t timeout_ns)
{
    struct task task = {.group = group, .in = in, .out = out, .root = call->root, .first = group->ticket};
    size_t slot = group->slot_bytes, table = ah_table_bytes(group);
    size_t largest = ah_largest_part(group, stated(&task), in);
    int small = fits(&task), code;

    if (slot <= table)
        return AH_INVALID;
    /* The same on every rank whatever its size: the size of a chunk must not depend on who asks. */
    task.chunk = ah_min(slot - table, AH_CHUNK_BYTES / 2);
    if ((code = ah_begin(group, call, small ? (uint32_t)in.bytes : AH_LONG, largest, timeout_ns)) != AH_OK)
        return code;
    if (small)
        ah_copy(ah_beside(group, group->rank, in.bytes), in.data, in.bytes, 0);
    else if ((code = give(&task, 0)) != AH_OK)
        return code;
    ah_publish(group);
    if ((code = ah_meet(group)) != AH_OK)
        return code;
    if (!ah_someone_long(group))
        return beside(&task);
    if (small)
        code = give(&task, 0);
    if (code == AH_OK && ah_someone_beside(group))
        code = ah_await_all(group, AH_ARRIVED, task.first + 1);
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
