/* broadcast: the root copies in chunk after chunk, everyone else copies out; of two ranks, the other reads it where it is. What
 * fits beside the call is left there by the root, which waits for nobody. */
#include "shm/fingerprint.h"
#include "collectives/collective.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/cico_slot.h"
#include "shm/wait.h"

/* One reader of so many bytes is faster without slots, unless they are swift (256 KiB: 19 against 22 us; where they are, 22 against
 * 10). More readers are not, nor is one beyond this: root and readers work at the same time only through slots. */
#define READER_FROM ((size_t)48 << 10)
#define READER_BELOW ((size_t)1 << 20)

struct task {
    struct ah_group *group;
    struct ah_part data;
    uint32_t root, first;
    int met; /* everyone has met, and what the other was to read goes through the slots after all */
};

/* Meet, once. */
static int meet(struct task *task)
{
    if (task->met)
        return AH_OK;
    task->met = 1;
    ah_publish(task->group);
    return ah_meet(task->group);
}

/* Where the chunk of a ticket stands. */
static unsigned char *place(const struct task *task, uint32_t ticket, size_t chunk)
{
    size_t bytes = ah_min(chunk, task->data.bytes);

    return ah_slot_at(task->group, task->root, ticket, bytes, bytes);
}

static int give(struct task *task, size_t chunk, size_t chunks)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = task->first + (uint32_t)index;

        if ((code = ah_await_slot(group, ticket)) != AH_OK)
            break;
        ah_fill(&group->store, place(task, ticket, chunk), task->data.data + index * chunk, ah_span(task->data.bytes, chunk, index));
        ah_post(group, AH_ARRIVED, ticket + 1);
        code = meet(task);
        /* Nobody gives to the root: it has taken all there is. */
        ah_post(group, AH_TAKEN, ticket + 1);
    }
    return code;
}

static int take(struct task *task, size_t chunk, size_t chunks)
{
    struct ah_group *group = task->group;
    int stream = task->data.bytes >= AH_STREAM_BYTES, code;

    /* Only the root has something to copy in; the others are there with all of theirs. */
    ah_post(group, AH_ARRIVED, task->first + (uint32_t)chunks);
    code = meet(task);
    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = task->first + (uint32_t)index;

        if ((code = ah_await(group, task->root, AH_ARRIVED, ticket + 1)) != AH_OK)
            break;
        ah_copy(task->data.data + index * chunk, place(task, ticket, chunk), ah_span(task->data.bytes, chunk, index), stream);
        ah_post(group, AH_TAKEN, ticket + 1);
    }
    return code;
}

static int beside(struct ah_group *group, struct ah_part data, uint32_t root)
{
    int code;

    if (group->rank == root) {
        ah_copy(ah_beside(group, root, data.bytes), data.data, data.bytes, 0);
        ah_publish(group);
        ah_leave(group);
        return AH_OK;
    }
    ah_publish(group);
    if ((code = ah_meet_one(group, root)) != AH_OK)
        return code;
    ah_copy(data.data, ah_beside(group, root, data.bytes), data.bytes, 0);
    ah_close(group);
    return AH_OK;
}

/* The same on every rank: all have the same bytes, which the meeting makes sure of before anyone reads. */
static int reads(const struct task *task)
{
    const struct ah_group *group = task->group;

    return group->pids && !group->swift && group->ranks == 2 && task->data.bytes >= READER_FROM && task->data.bytes < READER_BELOW;
}

/* The root says where its tensor is; the other reads it there. */
static int fetch(struct task *task)
{
    struct ah_group *group = task->group;
    uint64_t *address = (uint64_t *)ah_slot(group, task->root, task->first);
    int code = ah_await_slot(group, task->first);

    if (code != AH_OK)
        return code;
    if (group->rank == task->root)
        *address = (uintptr_t)task->data.data;
    ah_post(group, AH_ARRIVED, task->first + 1);
    if ((code = meet(task)) != AH_OK)
        return code;
    if (group->rank != task->root)
        code = ah_reach(group, task->root, task->data.data, *address, task->data.bytes);
    return ah_reached(group, task->first++, code);
}

int ah_broadcast(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns)
{
    const struct ah_call call = {.count = data.bytes, .kind = AH_BROADCAST, .dtype = (uint16_t)dtype, .root = (int16_t)root};
    struct task task = {.group = group, .data = data, .root = root, .first = group->ticket};
    size_t slot = group->slot_bytes;
    /* In two halves at least, so that copying in and copying out overlap. */
    size_t chunk = data.bytes <= AH_CHUNK_BYTES / 4 ? slot : ah_min(slot, AH_CHUNK_BYTES / 2);
    size_t chunks = ah_chunks(data.bytes, chunk);
    int code = root < group->ranks ? ah_begin(group, &call, 0, 0, timeout_ns) : AH_INVALID;

    if (code != AH_OK)
        return code;
    if (data.bytes <= AH_SHEET_BYTES)
        return beside(group, data, root);
    code = reads(&task) ? fetch(&task) : AH_UNREACHED;
    if (code == AH_UNREACHED)
        code = group->rank == root ? give(&task, chunk, chunks) : take(&task, chunk, chunks);
    else
        chunks = 0;
    if (code == AH_OK)
        ah_finish(group, task.first + (uint32_t)chunks);
    return code;
}
