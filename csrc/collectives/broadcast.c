/* broadcast: the root copies in chunk by chunk, the others copy out; with two ranks the other reads by single copy. A
 * small tensor is left in the payload, and the root does not wait. */
#include "shm/fingerprint.h"
#include "collectives/collective.h"
#include "shm/copy.h"
#include "shm/single_copy.h"
#include "shm/cico_slot.h"
#include "shm/wait.h"

/* Sizes for which one reader is faster with single copy, without a victim L3 (256 KiB: 19 against 22 us; with one 22
 * against 10). Beyond them, and with more readers, slots let root and readers overlap. */
#define READ_FROM ((size_t)48 << 10)
#define READ_BELOW ((size_t)1 << 20)

struct task {
    struct ah_group *group;
    struct ah_part data;
    uint32_t root, first;
    int compared; /* all fingerprints are compared, and the data goes through the slots after all */
};

/* Compare with all ranks, once. */
static int compare_once(struct task *task)
{
    if (task->compared)
        return AH_OK;
    task->compared = 1;
    ah_call_publish(task->group);
    return ah_call_compare_all(task->group);
}

/* The root's slot for a ticket. */
static unsigned char *slot_of(const struct task *task, uint32_t ticket, size_t chunk)
{
    size_t bytes = ah_min(chunk, task->data.bytes);

    return ah_cico_slot_at(task->group, task->root, ticket, bytes, bytes);
}

static int copy_in(struct task *task, size_t chunk, size_t chunks)
{
    struct ah_group *group = task->group;
    int code = AH_OK;

    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = task->first + (uint32_t)index;

        if ((code = ah_wait_slot(group, ticket)) != AH_OK)
            break;
        ah_nt_store_copy(&group->store, slot_of(task, ticket, chunk), task->data.data + index * chunk,
                         ah_chunk_bytes(task->data.bytes, chunk, index));
        ah_counter_set(group, AH_ARRIVED, ticket + 1);
        code = compare_once(task);
        /* The root receives nothing, so it has consumed the chunk. */
        ah_counter_set(group, AH_CONSUMED, ticket + 1);
    }
    return code;
}

static int copy_out(struct task *task, size_t chunk, size_t chunks)
{
    struct ah_group *group = task->group;
    int bypass = task->data.bytes >= AH_BYPASS_BYTES, code;

    /* Only the root copies data in; this rank has arrived with all chunks. */
    ah_counter_set(group, AH_ARRIVED, task->first + (uint32_t)chunks);
    code = compare_once(task);
    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = task->first + (uint32_t)index;

        if ((code = ah_wait_counter(group, task->root, AH_ARRIVED, ticket + 1)) != AH_OK)
            break;
        ah_copy(task->data.data + index * chunk, slot_of(task, ticket, chunk),
                ah_chunk_bytes(task->data.bytes, chunk, index), bypass);
        ah_counter_set(group, AH_CONSUMED, ticket + 1);
    }
    return code;
}

static int from_payloads(struct ah_group *group, struct ah_part data, uint32_t root)
{
    int code;

    if (group->rank == root) {
        ah_copy(ah_payload_of(group, root, data.bytes), data.data, data.bytes, 0);
        ah_call_publish(group);
        ah_call_end_uncompared(group);
        return AH_OK;
    }
    ah_call_publish(group);
    if ((code = ah_call_compare_one(group, root)) != AH_OK)
        return code;
    ah_copy(data.data, ah_payload_of(group, root, data.bytes), data.bytes, 0);
    ah_call_end(group);
    return AH_OK;
}

/* The same on every rank, because the comparison ensures equal sizes before any rank reads. */
static int uses_single_copy(const struct task *task)
{
    const struct ah_group *group = task->group;

    return group->pids && !group->victim_l3 && group->ranks == 2 && task->data.bytes >= READ_FROM &&
           task->data.bytes < READ_BELOW;
}

/* The root publishes the address of its tensor; the other rank reads it. */
static int single_copy(struct task *task)
{
    struct ah_group *group = task->group;
    uint64_t *address = (uint64_t *)ah_slot(group, task->root, task->first);
    int code = ah_wait_slot(group, task->first);

    if (code != AH_OK)
        return code;
    if (group->rank == task->root)
        *address = (uintptr_t)task->data.data;
    ah_counter_set(group, AH_ARRIVED, task->first + 1);
    if ((code = compare_once(task)) != AH_OK)
        return code;
    if (group->rank != task->root)
        code = ah_single_copy_read(group, task->root, task->data.data, *address, task->data.bytes);
    return ah_single_copy_finish(group, task->first++, code);
}

int ah_broadcast(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns)
{
    const struct ah_call call = {.count = data.bytes, .kind = AH_BROADCAST, .dtype = (uint16_t)dtype,
                                 .root = (int16_t)root};
    struct task task = {.group = group, .data = data, .root = root, .first = group->ticket};
    size_t slot = group->slot_bytes;
    /* In two halves at least, so that copying in and copying out overlap. */
    size_t chunk = data.bytes <= AH_CHUNK_BYTES / 4 ? slot : ah_min(slot, AH_CHUNK_BYTES / 2);
    size_t chunks = ah_chunk_count(data.bytes, chunk);
    int code = root < group->ranks ? ah_call_begin(group, &call, 0, 0, timeout_ns) : AH_INVALID;

    if (code != AH_OK)
        return code;
    if (data.bytes <= AH_PAYLOAD_BYTES)
        return from_payloads(group, data, root);
    code = uses_single_copy(&task) ? single_copy(&task) : AH_NOT_READ;
    if (code == AH_NOT_READ)
        code = group->rank == root ? copy_in(&task, chunk, chunks) : copy_out(&task, chunk, chunks);
    else
        chunks = 0;
    if (code == AH_OK)
        ah_call_end_chunks(group, task.first + (uint32_t)chunks);
    return code;
}
