/* Large messages through channels: the receiver lends one, the sender puts chunks in, the receiver takes them out, both
 * at the same time. */
#include "collectives/collective.h"
#include "shm/copy.h"
#include "p2p/request.h"

/* Bytes that go into a channel at a time, so that sender and receiver copy at the same time: a quarter of a message, but
 * not less than the passing of a line between two cores is worth, and no more than the first cache holds; of a message
 * that fills no cache, a quarter of the channel. */
#define CHUNK_BYTES ((size_t)32 << 10)
#define LARGE_CHUNK_BYTES (AH_BLOCK_BYTES)
#define LEAST_CHUNK_BYTES ((size_t)8 << 10)

/* Whoever sleeps is woken when half a channel is there for it, and not by each chunk: where there is no core for both, each
 * waking takes the core from the one that copies. Nobody stops before half: a sender stops at a full channel or at its end,
 * a receiver at an empty channel. */

/* Blocks that one message may have at most, so that others find some. Swift ones are faster in a longer channel (4 MiB: 225 to 263
 * against 380 us), others in a shorter (1 MiB: 114 against 140). */
#define MOST_BLOCKS 4
#define MOST_SWIFT_BLOCKS 8

/* A power of two, so that a whole number of chunks fills a channel. */
static size_t chunk_of(size_t bytes)
{
    size_t chunk = bytes >= AH_BYPASS_BYTES ? LARGE_CHUNK_BYTES : CHUNK_BYTES;

    while (chunk > LEAST_CHUNK_BYTES && chunk * 4 > bytes)
        chunk /= 2;
    return chunk;
}

/* Find a run of free blocks for a message; 0 where all are lent. Those that were lent longest ago come first: what is still in our
 * cache takes the sender three to five times as long to write. */
static int allocate_channel(struct ah_p2p *p2p, struct ah_request *request)
{
    uint32_t most = p2p->group->victim_l3 ? MOST_SWIFT_BLOCKS : MOST_BLOCKS;
    uint32_t want = (uint32_t)ah_min(most, (request->message.bytes + AH_BLOCK_BYTES - 1) / AH_BLOCK_BYTES);

    for (; want > 0; want--) {
        uint32_t run = (1u << want) - 1;

        for (uint32_t step = 0; step < AH_BLOCKS; step++) {
            uint32_t first = (p2p->after + step) % AH_BLOCKS;

            if (first + want <= AH_BLOCKS && (p2p->blocks & run << first) == 0) {
                p2p->blocks |= run << first;
                p2p->after = first + want;
                request->channel = first;
                request->blocks = want;
                return 1;
            }
        }
    }
    return 0;
}

/* Lend channels to those who wait for one, in their order, and tell the senders. */
size_t ah_p2p_grant(struct ah_p2p *p2p)
{
    size_t moved = 0;

    for (struct ah_request *request = p2p->matched.first, *next; request; request = next) {
        struct ah_envelope_header answer = {.source = p2p->group->rank, .kind = AH_CTS, .id = request->id};

        next = request->next;
        if (request->state == AH_MATCHED) {
            struct ah_channel *channel;

            if (!allocate_channel(p2p, request))
                break;
            channel = &p2p->mailbox->channels[request->channel];
            atomic_store_explicit(&channel->filled, 0, memory_order_relaxed);
            atomic_store_explicit(&channel->drained, 0, memory_order_relaxed);
            request->state = AH_CTS_UNSENT;
        }
        answer.tag = request->channel;
        answer.bytes = request->blocks;
        if (!ah_mailbox_put(p2p->group, request->message.peer, &answer, NULL))
            continue;
        request->state = AH_TRANSFERRING;
        ah_request_move(&p2p->incoming, request);
        moved++;
    }
    return moved;
}

/* Take the next chunk of each message that streams in. */
size_t ah_p2p_copy_out(struct ah_p2p *p2p)
{
    size_t moved = 0;

    for (struct ah_request *request = p2p->incoming.first, *next; request; request = next) {
        struct ah_channel *channel = &p2p->mailbox->channels[request->channel];
        size_t room = request->blocks * AH_BLOCK_BYTES, at = request->moved % room;
        size_t there = atomic_load_explicit(&channel->filled, memory_order_acquire) - request->moved;
        size_t left = request->message.bytes - request->moved; /* the sender's process writes `there` */
        size_t bytes = ah_min(ah_min(ah_min(there, left), room - at), chunk_of(request->message.bytes));

        next = request->next;
        if (bytes == 0)
            continue;
        /* Not past the caches: what is received is used next (16 MiB there and back: 1.5 against 2.1 ms). */
        ah_copy(request->message.data + request->moved, ah_block_of(p2p->group, p2p->group->rank, request->channel) + at,
                bytes, 0);
        request->moved += bytes;
        moved++;
        if (request->moved == request->message.bytes) {
            /* The sender has nothing more to put in, so it does not ask for room. */
            p2p->blocks &= ~(((1u << request->blocks) - 1) << request->channel);
            ah_request_complete(p2p, request, AH_OK, request->message.peer);
            continue;
        }
        atomic_store_explicit(&channel->drained, request->moved, memory_order_release);
        if (there - bytes <= room / 2)
            ah_mailbox_wake(p2p->group, request->message.peer);
    }
    return moved;
}

/* Give the next chunk of each message that streams out. */
size_t ah_p2p_copy_in(struct ah_p2p *p2p)
{
    size_t moved = 0;

    for (struct ah_request *request = p2p->outgoing.first, *next; request; request = next) {
        const struct ah_message *message = &request->message;
        struct ah_channel *channel = &ah_mailbox_of(p2p->group, message->peer)->channels[request->channel];
        size_t room = request->blocks * AH_BLOCK_BYTES, at = request->moved % room;
        size_t empty = room - (request->moved - atomic_load_explicit(&channel->drained, memory_order_acquire));
        size_t bytes = ah_min(ah_min(message->bytes - request->moved, chunk_of(message->bytes)), ah_min(empty, room - at));

        next = request->next;
        if (bytes == 0)
            continue;
        ah_nt_store_copy(&p2p->keep_unexpected, ah_block_of(p2p->group, message->peer, request->channel) + at, message->data + request->moved, bytes);
        request->moved += bytes;
        atomic_store_explicit(&channel->filled, request->moved, memory_order_release);
        if (request->moved == message->bytes || empty - bytes <= room / 2)
            ah_mailbox_wake(p2p->group, message->peer);
        moved++;
        if (request->moved == message->bytes)
            ah_request_complete(p2p, request, AH_OK, message->peer);
    }
    return moved;
}
