/* Large messages through lanes: the receiver lends one, the sender puts chunks in, the receiver takes them out, both
 * at the same time. */
#include "collectives/collective.h"
#include "shm/copy.h"
#include "p2p/request.h"

/* Bytes that go into a lane at a time, so that sender and receiver copy at the same time: a quarter of a message, but
 * not less than the passing of a line between two cores is worth, and no more than the first cache holds; of a message
 * that fills no cache, a quarter of the lane. */
#define CHUNK_BYTES ((size_t)32 << 10)
#define LARGE_CHUNK_BYTES (AH_BLOCK_BYTES)
#define LEAST_CHUNK_BYTES ((size_t)8 << 10)

/* Whoever sleeps is woken when half a lane is there for it, and not by each chunk: where there is no core for both, each
 * waking takes the core from the one that copies. Nobody stops before half: a sender stops at a full lane or at its end,
 * a receiver at an empty lane. */

/* Blocks that one message may have at most, so that others find some. Swift ones are faster in a longer lane (4 MiB: 225 to 263
 * against 380 us), others in a shorter (1 MiB: 114 against 140). */
#define MOST_BLOCKS 4
#define MOST_SWIFT_BLOCKS 8

/* A power of two, so that a whole number of chunks fills a lane. */
static size_t chunk_of(size_t bytes)
{
    size_t chunk = bytes >= AH_STREAM_BYTES ? LARGE_CHUNK_BYTES : CHUNK_BYTES;

    while (chunk > LEAST_CHUNK_BYTES && chunk * 4 > bytes)
        chunk /= 2;
    return chunk;
}

/* Find a run of free blocks for a message; 0 where all are lent. Those that were lent longest ago come first: what is still in our
 * cache takes the sender three to five times as long to write. */
static int lend(struct ah_mail *mail, struct ah_letter *letter)
{
    uint32_t most = mail->group->swift ? MOST_SWIFT_BLOCKS : MOST_BLOCKS;
    uint32_t want = (uint32_t)ah_min(most, (letter->message.bytes + AH_BLOCK_BYTES - 1) / AH_BLOCK_BYTES);

    for (; want > 0; want--) {
        uint32_t run = (1u << want) - 1;

        for (uint32_t step = 0; step < AH_BLOCKS; step++) {
            uint32_t first = (mail->after + step) % AH_BLOCKS;

            if (first + want <= AH_BLOCKS && (mail->blocks & run << first) == 0) {
                mail->blocks |= run << first;
                mail->after = first + want;
                letter->lane = first;
                letter->blocks = want;
                return 1;
            }
        }
    }
    return 0;
}

/* Lend lanes to those who wait for one, in their order, and tell the senders. */
size_t ah_mail_grant(struct ah_mail *mail)
{
    size_t moved = 0;

    for (struct ah_letter *letter = mail->matched.first, *next; letter; letter = next) {
        struct ah_cover answer = {.source = mail->group->rank, .kind = AH_GRANT, .id = letter->id};

        next = letter->next;
        if (letter->state == AH_MATCHED) {
            struct ah_lane *lane;

            if (!lend(mail, letter))
                break;
            lane = &mail->box->lanes[letter->lane];
            atomic_store_explicit(&lane->filled, 0, memory_order_relaxed);
            atomic_store_explicit(&lane->drained, 0, memory_order_relaxed);
            letter->state = AH_GRANTED;
        }
        answer.tag = letter->lane;
        answer.bytes = letter->blocks;
        if (!ah_inbox_put(mail->group, letter->message.peer, &answer, NULL))
            continue;
        letter->state = AH_STREAMS;
        ah_list_move(&mail->incoming, letter);
        moved++;
    }
    return moved;
}

/* Take the next chunk of each message that streams in. */
size_t ah_mail_take(struct ah_mail *mail)
{
    size_t moved = 0;

    for (struct ah_letter *letter = mail->incoming.first, *next; letter; letter = next) {
        struct ah_lane *lane = &mail->box->lanes[letter->lane];
        size_t room = letter->blocks * AH_BLOCK_BYTES, at = letter->moved % room;
        size_t there = atomic_load_explicit(&lane->filled, memory_order_acquire) - letter->moved;
        size_t bytes = ah_min(ah_min(there, room - at), chunk_of(letter->message.bytes));

        next = letter->next;
        if (bytes == 0)
            continue;
        /* Not past the caches: what is received is used next (16 MiB there and back: 1.5 against 2.1 ms). */
        ah_copy(letter->message.data + letter->moved, ah_block_of(mail->group, mail->group->rank, letter->lane) + at,
                bytes, 0);
        letter->moved += bytes;
        moved++;
        if (letter->moved == letter->message.bytes) {
            /* The sender has nothing more to put in, so it does not ask for room. */
            mail->blocks &= ~(((1u << letter->blocks) - 1) << letter->lane);
            ah_letter_end(mail, letter, AH_OK, letter->message.peer);
            continue;
        }
        atomic_store_explicit(&lane->drained, letter->moved, memory_order_release);
        if (there - bytes <= room / 2)
            ah_ring(mail->group, letter->message.peer);
    }
    return moved;
}

/* Give the next chunk of each message that streams out. */
size_t ah_mail_give(struct ah_mail *mail)
{
    size_t moved = 0;

    for (struct ah_letter *letter = mail->outgoing.first, *next; letter; letter = next) {
        const struct ah_message *message = &letter->message;
        struct ah_lane *lane = &ah_box_of(mail->group, message->peer)->lanes[letter->lane];
        size_t room = letter->blocks * AH_BLOCK_BYTES, at = letter->moved % room;
        size_t empty = room - (letter->moved - atomic_load_explicit(&lane->drained, memory_order_acquire));
        size_t bytes = ah_min(ah_min(message->bytes - letter->moved, chunk_of(message->bytes)), ah_min(empty, room - at));

        next = letter->next;
        if (bytes == 0)
            continue;
        ah_fill(&mail->store, ah_block_of(mail->group, message->peer, letter->lane) + at, message->data + letter->moved, bytes);
        letter->moved += bytes;
        atomic_store_explicit(&lane->filled, letter->moved, memory_order_release);
        if (letter->moved == message->bytes || empty - bytes <= room / 2)
            ah_ring(mail->group, message->peer);
        moved++;
        if (letter->moved == message->bytes)
            ah_letter_end(mail, letter, AH_OK, message->peer);
    }
    return moved;
}
