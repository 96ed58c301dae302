/* Matching and moving messages. */
#define _GNU_SOURCE
#include "mail.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collective.h"
#include "copy.h"
#include "letter.h"
#include "wait.h"

/* Bytes that go into a lane at a time: sender and receiver copy different chunks at the same time. */
#define CHUNK_BYTES ((size_t)64 << 10)

/* Blocks that one message may have at most, so that others find some. */
#define MOST_BLOCKS 4

static void append(struct ah_list *list, struct ah_letter *letter)
{
    letter->list = list;
    letter->next = NULL;
    letter->previous = list->last;
    if (list->last)
        list->last->next = letter;
    else
        list->first = letter;
    list->last = letter;
}

static void take_out(struct ah_letter *letter)
{
    struct ah_list *list = letter->list;

    if (!list)
        return;
    if (letter->previous)
        letter->previous->next = letter->next;
    else
        list->first = letter->next;
    if (letter->next)
        letter->next->previous = letter->previous;
    else
        list->last = letter->previous;
    letter->list = NULL;
}

static void move_to(struct ah_list *list, struct ah_letter *letter)
{
    take_out(letter);
    append(list, letter);
}

void ah_letter_remove(struct ah_mail *mail, struct ah_letter *letter)
{
    if (letter->list && letter->message.sends && letter->state == AH_WAITS)
        mail->waiting_sends--;
    take_out(letter);
    if (letter->later)
        letter->later->earlier = letter->earlier;
    else if (mail->latest == letter)
        mail->latest = letter->earlier;
    if (letter->earlier)
        letter->earlier->later = letter->later;
    letter->later = letter->earlier = NULL;
}

void ah_letter_end(struct ah_mail *mail, struct ah_letter *letter, int code, uint32_t peer)
{
    ah_letter_remove(mail, letter);
    letter->state = AH_OVER;
    letter->outcome = (struct ah_outcome){.code = code, .peer = peer};
    if (letter->posted) {
        mail->posted--;
        mail->posted_sends -= (size_t)letter->message.sends;
        append(&mail->finished, letter);
    }
    atomic_store_explicit(&letter->over, 1, memory_order_release);
    /* A thread of our own may sleep until this one is over. */
    ah_ring(mail->group, mail->group->rank);
}

/* Receiving ----------------------------------------------------------------------------------------------- */

/* End the group because a message does not fit its receive, and note both for whoever writes the sentence. */
static void misfit(struct ah_mail *mail, struct ah_letter *letter, const struct ah_cover *came)
{
    struct ah_odd *odd = ah_odd_of(mail->group);
    uint32_t nobody = 0;

    if (atomic_compare_exchange_strong(&odd->claimed, &nobody, 1)) {
        odd->source = came->source;
        odd->target = mail->group->rank;
        odd->tag = came->tag;
        odd->sent_bytes = came->bytes;
        odd->sent_dtype = came->dtype;
        odd->wanted_bytes = letter->message.bytes;
        odd->wanted_dtype = letter->message.dtype;
        atomic_store(&odd->whole, 1);
    }
    ah_end(mail->group, AH_MISMATCH, came->source);
    ah_letter_end(mail, letter, AH_MISMATCH, came->source);
    ah_ring_all(mail->group);
}

/* A receive has met its message. */
static void meet(struct ah_mail *mail, struct ah_letter *letter, const struct ah_cover *came, const void *payload)
{
    if (came->bytes != letter->message.bytes || came->dtype != letter->message.dtype) {
        misfit(mail, letter, came);
        return;
    }
    if (came->kind == AH_WHOLE) {
        if (came->bytes != 0)
            memcpy(letter->message.data, payload, came->bytes);
        ah_letter_end(mail, letter, AH_OK, came->source);
        return;
    }
    letter->state = AH_MATCHED;
    letter->message.peer = came->source;
    letter->id = came->id;
    move_to(&mail->matched, letter);
}

static struct ah_letter *first_with(const struct ah_list *list, uint64_t tag)
{
    struct ah_letter *letter = list->first;

    while (letter && letter->message.tag != tag)
        letter = letter->next;
    return letter;
}

/* Keep a message that nobody has asked for yet. */
static int store(struct ah_mail *mail, const struct ah_cover *came, const void *payload)
{
    size_t bytes = came->kind == AH_WHOLE ? came->bytes : 0;
    struct ah_letter *stray = malloc(sizeof *stray + bytes);

    if (!stray)
        return 0;
    memset(stray, 0, sizeof *stray);
    stray->message = (struct ah_message){
        .bytes = came->bytes, .tag = came->tag, .dtype = came->dtype, .peer = came->source};
    stray->kind = came->kind;
    stray->id = came->id;
    stray->order = mail->order++;
    if (bytes != 0)
        memcpy(stray->stored, payload, bytes);
    append(&mail->strays[came->source], stray);
    return 1;
}

/* A grant came: stream. */
static void granted(struct ah_mail *mail, const struct ah_cover *came)
{
    for (struct ah_letter *letter = mail->offered.first; letter; letter = letter->next) {
        if (letter->id == came->id && letter->message.peer == came->source) {
            letter->lane = (uint32_t)came->tag;
            letter->blocks = (uint32_t)came->bytes;
            letter->state = AH_STREAMS;
            move_to(&mail->outgoing, letter);
            return;
        }
    }
}

static int accept(struct ah_mail *mail, const struct ah_cover *came, const void *payload)
{
    struct ah_letter *one, *any;

    if (came->kind == AH_GRANT) {
        granted(mail, came);
        return 1;
    }
    one = first_with(&mail->receives[came->source], came->tag);
    any = first_with(&mail->receives[mail->group->ranks], came->tag);
    if (any && (!one || any->order < one->order))
        one = any;
    if (!one)
        return store(mail, came, payload);
    meet(mail, one, came, payload);
    return 1;
}

/* Empty our box, whoever may want what is in it: what is wanted may stand behind it. */
static size_t drain(struct ah_mail *mail)
{
    const struct ah_envelope *came;
    size_t taken = 0;

    while ((came = ah_inbox_look(mail->group, mail->head)) != NULL &&
           accept(mail, &came->cover, came->payload)) {
        ah_inbox_free(mail->group, mail->head++);
        taken++;
    }
    if (taken != 0) {
        /* Pairs with the fence of whoever found the ring full. */
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&mail->box->starving, memory_order_relaxed) != 0) {
            atomic_store(&mail->box->starving, 0);
            ah_ring_all(mail->group);
        }
    }
    return taken;
}

/* The stray that a new receive takes, NULL where none fits. */
static struct ah_letter *stray_for(const struct ah_mail *mail, const struct ah_message *message)
{
    struct ah_letter *best = NULL;

    if (message->peer != AH_ANYONE)
        return first_with(&mail->strays[message->peer], message->tag);
    for (uint32_t source = 0; source < mail->group->ranks; source++) {
        struct ah_letter *found = first_with(&mail->strays[source], message->tag);

        if (found && (!best || found->order < best->order))
            best = found;
    }
    return best;
}

static void add_receive(struct ah_mail *mail, struct ah_letter *letter)
{
    const struct ah_message *message = &letter->message;
    struct ah_letter *stray = stray_for(mail, message);

    if (stray) {
        const struct ah_cover came = {.tag = stray->message.tag,
                                      .bytes = stray->message.bytes,
                                      .source = stray->message.peer,
                                      .dtype = stray->message.dtype,
                                      .kind = stray->kind,
                                      .id = stray->id};

        take_out(stray);
        meet(mail, letter, &came, stray->stored);
        free(stray);
        return;
    }
    append(&mail->receives[message->peer == AH_ANYONE ? mail->group->ranks : message->peer], letter);
}

/* Find a run of free blocks for `bytes`; 0 where all are lent. */
static int lend(struct ah_mail *mail, struct ah_letter *letter)
{
    uint32_t want = (uint32_t)ah_min(MOST_BLOCKS, (letter->message.bytes + AH_BLOCK_BYTES - 1) / AH_BLOCK_BYTES);

    for (; want > 0; want--) {
        uint32_t run = (1u << want) - 1;

        for (uint32_t first = 0; first + want <= AH_BLOCKS; first++) {
            if ((mail->blocks & run << first) == 0) {
                mail->blocks |= run << first;
                letter->lane = first;
                letter->blocks = want;
                return 1;
            }
        }
    }
    return 0;
}

/* Lend lanes to those who wait for one, in their order, and tell the senders. */
static size_t grant(struct ah_mail *mail)
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
        move_to(&mail->incoming, letter);
        moved++;
    }
    return moved;
}

/* Take the next chunk of each message that streams in. */
static size_t take(struct ah_mail *mail)
{
    size_t moved = 0;

    for (struct ah_letter *letter = mail->incoming.first, *next; letter; letter = next) {
        struct ah_lane *lane = &mail->box->lanes[letter->lane];
        size_t room = letter->blocks * AH_BLOCK_BYTES, at = letter->moved % room;
        size_t there = atomic_load_explicit(&lane->filled, memory_order_acquire) - letter->moved;
        size_t bytes = ah_min(ah_min(there, room - at), CHUNK_BYTES);

        next = letter->next;
        if (bytes == 0)
            continue;
        ah_copy(letter->message.data + letter->moved, ah_block_of(mail->group, mail->group->rank, letter->lane) + at,
                bytes, letter->message.bytes >= AH_STREAM_BYTES);
        letter->moved += bytes;
        moved++;
        if (letter->moved == letter->message.bytes) {
            /* The sender has nothing more to put in, so it does not ask for room. */
            mail->blocks &= ~(((1u << letter->blocks) - 1) << letter->lane);
            ah_letter_end(mail, letter, AH_OK, letter->message.peer);
            continue;
        }
        atomic_store_explicit(&lane->drained, letter->moved, memory_order_release);
        ah_ring(mail->group, letter->message.peer);
    }
    return moved;
}

/* Sending ------------------------------------------------------------------------------------------------- */

/* Put the envelope of a send into the target's box; 0 where there is no room. */
static int offer(struct ah_mail *mail, struct ah_letter *letter)
{
    const struct ah_message *message = &letter->message;
    const struct ah_cover cover = {.tag = message->tag,
                                   .bytes = message->bytes,
                                   .source = mail->group->rank,
                                   .dtype = message->dtype,
                                   .kind = message->bytes <= AH_EAGER_BYTES ? AH_WHOLE : AH_OFFER,
                                   .id = letter->id};

    if (!ah_inbox_put(mail->group, message->peer, &cover, message->data))
        return 0;
    if (cover.kind == AH_WHOLE) {
        ah_letter_end(mail, letter, AH_OK, message->peer);
        return 1;
    }
    letter->state = AH_OFFERED;
    move_to(&mail->offered, letter);
    return 1;
}

static void add_send(struct ah_mail *mail, struct ah_letter *letter)
{
    struct ah_list *before = &mail->unsent[letter->message.peer];

    letter->id = mail->id++;
    if (before->first || !offer(mail, letter)) {
        append(before, letter);
        mail->waiting_sends++;
    }
}

static size_t retry(struct ah_mail *mail)
{
    size_t moved = 0;

    for (uint32_t rank = 0; mail->waiting_sends != 0 && rank < mail->group->ranks; rank++) {
        struct ah_letter *letter;

        while ((letter = mail->unsent[rank].first) != NULL) {
            /* What `offer` does with it takes it out of the list; it is counted there only while it waits. */
            take_out(letter);
            mail->waiting_sends--;
            if (!offer(mail, letter)) {
                struct ah_list *list = &mail->unsent[rank];

                letter->list = list;
                letter->previous = NULL;
                letter->next = list->first;
                if (list->first)
                    list->first->previous = letter;
                else
                    list->last = letter;
                list->first = letter;
                mail->waiting_sends++;
                break;
            }
            moved++;
        }
    }
    return moved;
}

/* Give the next chunk of each message that streams out. */
static size_t give(struct ah_mail *mail)
{
    size_t moved = 0;

    for (struct ah_letter *letter = mail->outgoing.first, *next; letter; letter = next) {
        const struct ah_message *message = &letter->message;
        struct ah_lane *lane = &ah_box_of(mail->group, message->peer)->lanes[letter->lane];
        size_t room = letter->blocks * AH_BLOCK_BYTES, at = letter->moved % room;
        size_t empty = room - (letter->moved - atomic_load_explicit(&lane->drained, memory_order_acquire));
        size_t bytes = ah_min(ah_min(message->bytes - letter->moved, CHUNK_BYTES), ah_min(empty, room - at));

        next = letter->next;
        if (bytes == 0)
            continue;
        ah_copy(ah_block_of(mail->group, message->peer, letter->lane) + at, message->data + letter->moved, bytes, 0);
        letter->moved += bytes;
        atomic_store_explicit(&lane->filled, letter->moved, memory_order_release);
        ah_ring(mail->group, message->peer);
        moved++;
        if (letter->moved == message->bytes)
            ah_letter_end(mail, letter, AH_OK, message->peer);
    }
    return moved;
}

/* Both ---------------------------------------------------------------------------------------------------- */

void ah_letter_add(struct ah_mail *mail, struct ah_letter *letter)
{
    letter->order = mail->order++;
    letter->earlier = mail->latest;
    if (mail->latest)
        mail->latest->later = letter;
    mail->latest = letter;
    if (letter->message.sends)
        add_send(mail, letter);
    else
        add_receive(mail, letter);
}

size_t ah_mail_pass(struct ah_mail *mail)
{
    size_t moved = drain(mail);

    if (mail->waiting_sends != 0)
        moved += retry(mail);
    if (mail->matched.first)
        moved += grant(mail);
    if (mail->outgoing.first)
        moved += give(mail);
    if (mail->incoming.first)
        moved += take(mail);
    return moved;
}

struct ah_mail *ah_mail_open(struct ah_group *group)
{
    struct ah_mail *mail = calloc(1, sizeof *mail);
    pthread_condattr_t clock;

    if (!mail)
        return NULL;
    mail->group = group;
    mail->box = ah_box_of(group, group->rank);
    mail->receives = calloc(group->ranks + 1, sizeof *mail->receives);
    mail->strays = calloc(group->ranks, sizeof *mail->strays);
    mail->unsent = calloc(group->ranks, sizeof *mail->unsent);
    mail->looks = calloc(group->ranks, sizeof *mail->looks);
    pthread_mutex_init(&mail->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&mail->work, &clock);
    pthread_condattr_destroy(&clock);
    if (mail->receives && mail->strays && mail->unsent && mail->looks)
        return mail;
    ah_mail_free(mail);
    return NULL;
}

void ah_mail_free(struct ah_mail *mail)
{
    for (uint32_t rank = 0; mail->strays && rank < mail->group->ranks; rank++) {
        struct ah_letter *stray;

        while ((stray = mail->strays[rank].first) != NULL) {
            take_out(stray);
            free(stray);
        }
    }
    free(mail->receives);
    free(mail->strays);
    free(mail->unsent);
    free(mail->looks);
    pthread_cond_destroy(&mail->work);
    pthread_mutex_destroy(&mail->lock);
    free(mail);
}
