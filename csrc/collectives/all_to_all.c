/* all_to_all and scatter: a slot is cut into one piece for each rank, which that rank copies out; or it reads its part
 * where it is. Equal parts that fit beside the call stand there; the root of a scatter leaves them and waits for nobody. */
#include "shm/fingerprint.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/part_sizes.h"
#include "shm/wait.h"

struct task {
    struct ah_group *group;
    const struct ah_part *in;  /* NULL where this rank gives nothing */
    const struct ah_part *out; /* from each rank; NULL with a root: `only` comes from it */
    struct ah_part only;
    int32_t root;
    int staged; /* all goes through the slots, whatever its size */
    uint32_t first;
    size_t piece;
};

static int give(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    unsigned char *to = ah_parts_at(group, group->rank, ticket);
    int code = ah_await_slot(group, ticket), read = 0;

    if (code != AH_OK)
        return code;
    if (index == 0 && !task->staged) {
        ah_state_parts(group, ticket, task->in, task->only);
        read = ah_reaches(group, ah_largest_part(group, task->in, task->only));
    }
    for (uint32_t rank = 0; task->in && !read && rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_fill(&group->store, to + rank * task->piece, task->in[rank].data + index * task->piece,
                    ah_span(task->in[rank].bytes, task->piece, index));
    }
    ah_post(group, AH_ARRIVED, ticket + 1);
    return AH_OK;
}

static int take_from(const struct task *task, size_t index, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;
    uint32_t ticket = task->first + (uint32_t)index;
    size_t at = index * task->piece;
    const unsigned char *from = ah_parts_at(group, rank, ticket) + group->rank * task->piece;
    int code = rank == group->rank ? AH_OK : ah_await(group, rank, AH_ARRIVED, ticket + 1);

    if (code != AH_OK)
        return code;
    if (rank == group->rank)
        from = task->in[rank].data + at;
    if (from != out.data + at)
        ah_copy(out.data + at, from, ah_span(out.bytes, task->piece, index), out.bytes >= AH_STREAM_BYTES);
    return AH_OK;
}

static int take(const struct task *task, size_t index)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    if (task->root >= 0)
        code = take_from(task, index, (uint32_t)task->root, task->only);
    for (uint32_t step = 0; code == AH_OK && task->out && step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;

        code = take_from(task, index, rank, task->out[rank]);
    }
    if (code == AH_OK)
        ah_post(group, AH_TAKEN, task->first + (uint32_t)index + 1);
    return code;
}

static int fetch_from(const struct task *task, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;

    if (rank != group->rank)
        return ah_reach(group, rank, out.data, ah_stated_address(group, task->first, rank), out.bytes);
    if (out.data != task->in[rank].data)
        ah_copy(out.data, task->in[rank].data, out.bytes, out.bytes >= AH_STREAM_BYTES);
    return AH_OK;
}

/* Read everyone's part for us where it is. */
static int fetch(const struct task *task)
{
    uint32_t self = task->group->rank, ranks = task->group->ranks;
    int code = AH_OK;

    if (task->root >= 0)
        return fetch_from(task, (uint32_t)task->root, task->only);
    for (uint32_t step = 0; code == AH_OK && step < ranks; step++)
        code = fetch_from(task, (self + step) % ranks, task->out[(self + step) % ranks]);
    return code;
}

/* The bytes of each part where all are equal and fit beside a call, else AH_LONG. */
static uint32_t fits(const struct task *task)
{
    size_t bytes = task->root < 0 ? task->out[0].bytes : task->only.bytes;

    if (bytes * task->group->ranks > AH_SHEET_BYTES)
        return AH_LONG;
    for (uint32_t rank = 0; rank < task->group->ranks; rank++) {
        if ((task->in && task->in[rank].bytes != bytes) || (task->out && task->out[rank].bytes != bytes))
            return AH_LONG;
    }
    return (uint32_t)bytes;
}

static void copy_beside(const struct task *task, size_t bytes)
{
    struct ah_group *group = task->group;
    unsigned char *to = ah_beside(group, group->rank, bytes * group->ranks);

    /* Our own part is read where it is. */
    for (uint32_t rank = 0; task->in && rank < group->ranks; rank++) {
        if (rank != group->rank)
            ah_copy(to + rank * bytes, task->in[rank].data, bytes, 0);
    }
}

/* Copy our part out of what `rank` has beside the call. */
static void take_beside(const struct task *task, uint32_t rank, struct ah_part out)
{
    struct ah_group *group = task->group;

    if (rank != group->rank)
        ah_copy(out.data, ah_beside(group, rank, out.bytes * group->ranks) + group->rank * out.bytes, out.bytes, 0);
    else if (out.data != task->in[rank].data)
        ah_copy(out.data, task->in[rank].data, out.bytes, 0);
}

/* Everyone's is beside the call. */
static int exchange(const struct task *task)
{
    struct ah_group *group = task->group;

    for (uint32_t rank = 0; rank < group->ranks; rank++) {
        if (task->out[rank].bytes != ah_card_of(group, rank)->bytes)
            return ah_differ(group, rank);
    }
    /* Our own first: the results of others may go where it is. */
    for (uint32_t step = 0; step < group->ranks; step++) {
        uint32_t rank = (group->rank + step) % group->ranks;

        take_beside(task, rank, task->out[rank]);
    }
    ah_close(group);
    return AH_OK;
}

/* The root's is beside the call, or the root says that it is not: AH_LONG in `bytes`. */
static int take_scattered(const struct task *task, uint32_t *bytes)
{
    struct ah_group *group = task->group;
    uint32_t root = (uint32_t)task->root;
    int code = AH_OK;

    if (group->rank != root)
        code = ah_meet_one(group, root);
    if (code != AH_OK)
        return code;
    *bytes = ah_card_of(group, root)->bytes;
    if (*bytes == AH_LONG)
        return AH_OK;
    if (*bytes != task->only.bytes)
        return ah_differ(group, group->rank);
    take_beside(task, root, task->only);
    if (group->rank == root)
        ah_leave(group);
    else
        ah_close(group);
    return AH_OK;
}

/* Everyone has met, and the first chunk of all stands in the slots. */
static int through_slots(struct task *task)
{
    struct ah_group *group = task->group;
    size_t chunks;
    int code = task->root < 0 ? ah_check_sizes(group, task->first, task->out)
                              : ah_check_root(group, task->first, (uint32_t)task->root, task->only.bytes);

    if (code != AH_OK)
        return code;
    chunks = ah_chunks(ah_largest(group), task->piece);
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

static int run(struct task *task, const struct ah_call *call, int64_t timeout_ns)
{
    struct ah_group *group = task->group;
    size_t slot = group->slot_bytes, table = ah_table_bytes(group);
    uint32_t bytes = fits(task), theirs = AH_LONG;
    int code;

    task->first = group->ticket;
    if (slot < table + group->ranks * AH_LINE)
        return AH_INVALID;
    task->piece = ah_min(slot - table, AH_CHUNK_BYTES) / group->ranks / AH_LINE * AH_LINE;
    if ((code = ah_begin(group, call, bytes, ah_largest_part(group, task->in, task->only), timeout_ns)) != AH_OK)
        return code;
    if (bytes != AH_LONG)
        copy_beside(task, bytes);
    else if ((code = give(task, 0)) != AH_OK)
        return code;
    ah_publish(group);
    if (bytes != AH_LONG && task->root >= 0 && ((code = take_scattered(task, &theirs)) != AH_OK || theirs != AH_LONG))
        return code;
    if ((code = ah_meet(group)) != AH_OK)
        return code;
    if (task->root < 0 && !ah_someone_long(group))
        return exchange(task);
    /* A root that left its parts does not come through the slots: its parts are smaller than ours. */
    if (task->root >= 0 && ah_card_of(group, (uint32_t)task->root)->bytes != AH_LONG)
        return ah_differ(group, group->rank);
    if (bytes != AH_LONG)
        code = give(task, 0);
    if (code == AH_OK && ah_someone_beside(group))
        code = ah_await_all(group, AH_ARRIVED, task->first + 1);
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
