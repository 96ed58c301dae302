/* broadcast: the root copies in chunk after chunk, everyone else copies out. What fits beside the call is left there by the
 * root, which waits for nobody. */
#include "card.h"
#include "collective.h"
#include "copy.h"
#include "wait.h"

static int give(struct ah_group *group, struct ah_part data, size_t chunk, size_t chunks, uint32_t first)
{
    int code = AH_OK;

    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = first + (uint32_t)index;

        if ((code = ah_await_slot(group, ticket)) != AH_OK)
            break;
        ah_copy(ah_slot(group, group->rank, ticket), data.data + index * chunk, ah_span(data.bytes, chunk, index), 0);
        ah_post(group, AH_ARRIVED, ticket + 1);
        if (index == 0) {
            ah_publish(group);
            code = ah_meet(group);
        }
        /* Nobody gives to the root: it has taken all there is. */
        ah_post(group, AH_TAKEN, ticket + 1);
    }
    return code;
}

static int take(struct ah_group *group, struct ah_part data, size_t chunk, size_t chunks, uint32_t first, uint32_t root)
{
    int stream = data.bytes >= AH_STREAM_BYTES, code;

    /* Only the root has something to copy in; the others are there with all of theirs. */
    ah_post(group, AH_ARRIVED, first + (uint32_t)chunks);
    ah_publish(group);
    code = ah_meet(group);
    for (size_t index = 0; code == AH_OK && index < chunks; index++) {
        uint32_t ticket = first + (uint32_t)index;

        if ((code = ah_await(group, root, AH_ARRIVED, ticket + 1)) != AH_OK)
            break;
        ah_copy(data.data + index * chunk, ah_slot(group, root, ticket), ah_span(data.bytes, chunk, index), stream);
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

int ah_broadcast(struct ah_group *group, struct ah_part data, uint32_t dtype, uint32_t root, int64_t timeout_ns)
{
    const struct ah_call call = {.count = data.bytes, .kind = AH_BROADCAST, .dtype = (uint16_t)dtype, .root = (int16_t)root};
    size_t slot = group->head->slot_bytes;
    /* In two halves at least, so that copying in and copying out overlap. */
    size_t chunk = data.bytes <= AH_CHUNK_BYTES / 4 ? slot : ah_min(slot, AH_CHUNK_BYTES / 2);
    size_t chunks = ah_chunks(data.bytes, chunk);
    uint32_t first = group->ticket;
    int code = root < group->ranks ? ah_begin(group, &call, 0, timeout_ns) : AH_BROKEN;

    if (code == AH_OK && data.bytes <= AH_SHEET_BYTES)
        return beside(group, data, root);
    if (code == AH_OK)
        code = group->rank == root ? give(group, data, chunk, chunks, first)
                                   : take(group, data, chunk, chunks, first, root);
    if (code == AH_OK)
        ah_finish(group, first + (uint32_t)chunks);
    return code;
}
