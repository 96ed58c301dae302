/* Matching messages and receives, and one pass over all that is under way. */
#define _GNU_SOURCE
#include "p2p/matching.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "p2p/request.h"
#include "shm/wait.h"

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
    ah_list_move(&mail->matched, letter);
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
    ah_list_append(&mail->strays[came->source], stray);
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
            ah_list_move(&mail->outgoing, letter);
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

        ah_list_take_out(stray);
        meet(mail, letter, &came, stray->stored);
        free(stray);
        return;
    }
    ah_list_append(&mail->receives[message->peer == AH_ANYONE ? mail->group->ranks : message->peer], letter);
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
    ah_list_move(&mail->offered, letter);
    return 1;
}

static void add_send(struct ah_mail *mail, struct ah_letter *letter)
{
    struct ah_list *before = &mail->unsent[letter->message.peer];

    letter->id = mail->id++;
    if (before->first || !offer(mail, letter)) {
        ah_list_append(before, letter);
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
            ah_list_take_out(letter);
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
        moved += ah_mail_grant(mail);
    if (mail->outgoing.first)
        moved += ah_mail_give(mail);
    if (mail->incoming.first)
        moved += ah_mail_take(mail);
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
            ah_list_take_out(stray);
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
