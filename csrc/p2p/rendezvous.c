/* Large messages: the receiver allocates a channel, the sender copies chunks in and the receiver copies them out,
 * concurrently. */
#include "collectives/collective.h"
#include "shm/copy.h"
#include "p2p/request.h"

/* Chunk size: a quarter of the message, so that sender and receiver overlap, at least enough to pay for passing a
 * line between two cores, at most what L1 holds. Messages beyond the caches: one block. */
#define CHUNK_BYTES ((size_t)32 << 10)
#define LARGE_CHUNK_BYTES (AH_BLOCK_BYTES)
#define LEAST_CHUNK_BYTES ((size_t)8 << 10)

/* A sleeper is woken when half of the channel is ready for it, not for each chunk: without a core for both, each
 * wake-up stops the one that copies. A sender stops only at a full channel or its end, a receiver at an empty one. */

/* Most blocks of one message, so that others find some. With a victim L3 a longer channel is faster (4 MiB: 225 to
 * 263 against 380 us), otherwise a shorter one (1 MiB: 114 against 140). */
#define MOST_BLOCKS 4
#define MOST_BLOCKS_VICTIM_L3 8

/* A power of two, so that a whole number of chunks fills a channel. */
static size_t chunk_of(size_t bytes)
{
    size_t chunk = bytes >= AH_BYPASS_BYTES ? LARGE_CHUNK_BYTES : CHUNK_BYTES;

    while (chunk > LEAST_CHUNK_BYTES && chunk * 4 > bytes)
        chunk /= 2;
    return chunk;
}

/* Allocate a run of free blocks; 0 if there is none. Least recently used first: writing blocks that are still in our
 * L2 takes the sender three to five times as long. */
static int allocate_channel(struct ah_p2p *p2p, struct ah_request *request)
{
    uint32_t most = p2p->group->victim_l3 ? MOST_BLOCKS_VICTIM_L3 : MOST_BLOCKS;
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

/* Allocate channels for matched receives, in order, and send each CTS. */
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

/* Copy the next chunk out of each incoming channel. */
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
        /* Through the caches: received data is used next (16 MiB there and back: 1.5 against 2.1 ms). */
        ah_copy(request->message.data + request->moved,
                ah_block_of(p2p->group, p2p->group->rank, request->channel) + at, bytes, 0);
        request->moved += bytes;
        moved++;
        if (request->moved == request->message.bytes) {
            /* The sender has nothing left to write, so it waits for no room. */
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

/* Copy the next chunk into each outgoing channel. */
size_t ah_p2p_copy_in(struct ah_p2p *p2p)
{
    size_t moved = 0;

    for (struct ah_request *request = p2p->outgoing.first, *next; request; request = next) {
        const struct ah_message *message = &request->message;
        struct ah_channel *channel = &ah_mailbox_of(p2p->group, message->peer)->channels[request->channel];
        size_t room = request->blocks * AH_BLOCK_BYTES, at = request->moved % room;
        size_t empty = room - (request->moved - atomic_load_explicit(&channel->drained, memory_order_acquire));
        size_t bytes = ah_min(ah_min(message->bytes - request->moved, chunk_of(message->bytes)),
                              ah_min(empty, room - at));

        next = request->next;
        if (bytes == 0)
            continue;
        ah_nt_store_copy(&p2p->nt_store, ah_block_of(p2p->group, message->peer, request->channel) + at,
                         message->data + request->moved, bytes);
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
