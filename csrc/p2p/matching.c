/* Matching of messages and receives, and one poll of all requests. */
#define _GNU_SOURCE
#include "p2p/matching.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "p2p/request.h"
#include "shm/wait.h"

/* Receiving ----------------------------------------------------------------------------------------------- */

/* End the group because a message does not fit its receive, and record both. */
static void mismatch(struct ah_p2p *p2p, struct ah_request *request, const struct ah_envelope_header *header)
{
    struct ah_message_mismatch *found = ah_message_mismatch_of(p2p->group);
    uint32_t unclaimed = 0;

    if (atomic_compare_exchange_strong(&found->claimed, &unclaimed, 1)) {
        found->source = header->source;
        found->target = p2p->group->rank;
        found->tag = header->tag;
        found->sent_bytes = header->bytes;
        found->sent_dtype = header->dtype;
        found->wanted_bytes = request->message.bytes;
        found->wanted_dtype = request->message.dtype;
        atomic_store(&found->whole, 1);
    }
    ah_group_end(p2p->group, AH_MISMATCH, header->source);
    ah_request_complete(p2p, request, AH_MISMATCH, header->source);
    ah_mailbox_wake_all(p2p->group);
}

/* A receive matched a message. */
static void match(struct ah_p2p *p2p, struct ah_request *request, const struct ah_envelope_header *header,
                  const void *payload)
{
    if (header->bytes != request->message.bytes || header->dtype != request->message.dtype) {
        mismatch(p2p, request, header);
        return;
    }
    if (header->kind == AH_EAGER) {
        if (header->bytes != 0)
            memcpy(request->message.data, payload, header->bytes);
        ah_request_complete(p2p, request, AH_OK, header->source);
        return;
    }
    request->state = AH_MATCHED;
    request->message.peer = header->source;
    request->id = header->id;
    ah_request_move(&p2p->matched, request);
}

static struct ah_request *find_tag(const struct ah_request_list *list, uint64_t tag)
{
    struct ah_request *request = list->first;

    while (request && request->message.tag != tag)
        request = request->next;
    return request;
}

/* Keep an unexpected message. */
static int keep_unexpected(struct ah_p2p *p2p, const struct ah_envelope_header *header, const void *payload)
{
    size_t bytes = header->kind == AH_EAGER ? header->bytes : 0;
    struct ah_request *unexpected = malloc(sizeof *unexpected + bytes);

    if (!unexpected)
        return 0;
    memset(unexpected, 0, sizeof *unexpected);
    unexpected->message = (struct ah_message){
        .bytes = header->bytes, .tag = header->tag, .dtype = header->dtype, .peer = header->source};
    unexpected->kind = header->kind;
    unexpected->id = header->id;
    unexpected->order = p2p->order++;
    if (bytes != 0)
        memcpy(unexpected->payload, payload, bytes);
    ah_request_append(&p2p->unexpected[header->source], unexpected);
    return 1;
}

/* A CTS arrived: begin the transfer. */
static void begin_transfer(struct ah_p2p *p2p, const struct ah_envelope_header *header)
{
    for (struct ah_request *request = p2p->awaiting_cts.first; request; request = request->next) {
        if (request->id == header->id && request->message.peer == header->source) {
            request->channel = (uint32_t)header->tag;
            request->blocks = (uint32_t)header->bytes;
            request->state = AH_TRANSFERRING;
            ah_request_move(&p2p->outgoing, request);
            return;
        }
    }
}

/* Whether a header that another process wrote is safe to use: its source, and its sizes as lengths and indexes. */
static int is_valid(const struct ah_p2p *p2p, const struct ah_envelope_header *header)
{
    if (header->source >= p2p->group->ranks)
        return 0;
    if (header->kind == AH_CTS)
        return header->bytes >= 1 && header->bytes <= AH_BLOCKS && header->tag <= AH_BLOCKS - header->bytes;
    return header->kind == AH_RTS || (header->kind == AH_EAGER && header->bytes <= AH_EAGER_BYTES);
}

static int receive_envelope(struct ah_p2p *p2p, const struct ah_envelope_header *header, const void *payload)
{
    struct ah_request *one, *any;

    if (!is_valid(p2p, header)) {
        ah_group_end(p2p->group, AH_INVALID, p2p->group->rank);
        ah_mailbox_wake_all(p2p->group);
        return 1;
    }
    if (header->kind == AH_CTS) {
        begin_transfer(p2p, header);
        return 1;
    }
    one = find_tag(&p2p->posted_receives[header->source], header->tag);
    any = find_tag(&p2p->posted_receives[p2p->group->ranks], header->tag);
    if (any && (!one || any->order < one->order))
        one = any;
    if (!one)
        return keep_unexpected(p2p, header, payload);
    match(p2p, one, header, payload);
    return 1;
}

/* Read all envelopes, also those without a posted receive: the one that is waited for may be behind them. */
static size_t drain_mailbox(struct ah_p2p *p2p)
{
    const struct ah_envelope *envelope;
    size_t taken = 0;

    while ((envelope = ah_mailbox_peek(p2p->group, p2p->head)) != NULL) {
        /* A copy: another process can change the original after it was checked. */
        const struct ah_envelope_header header = envelope->header;

        if (!receive_envelope(p2p, &header, envelope->payload))
            break;
        ah_mailbox_release(p2p->group, p2p->head++);
        taken++;
    }
    if (taken != 0) {
        /* Pairs with the fence of a sender that found the ring full. */
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&p2p->mailbox->senders_waiting, memory_order_relaxed) != 0) {
            atomic_store(&p2p->mailbox->senders_waiting, 0);
            ah_mailbox_wake_all(p2p->group);
        }
    }
    return taken;
}

/* The oldest unexpected message that matches a new receive, NULL if none does. */
static struct ah_request *find_unexpected(const struct ah_p2p *p2p, const struct ah_message *message)
{
    struct ah_request *best = NULL;

    if (message->peer != AH_ANY_SOURCE)
        return find_tag(&p2p->unexpected[message->peer], message->tag);
    for (uint32_t source = 0; source < p2p->group->ranks; source++) {
        struct ah_request *found = find_tag(&p2p->unexpected[source], message->tag);

        if (found && (!best || found->order < best->order))
            best = found;
    }
    return best;
}

static void add_receive(struct ah_p2p *p2p, struct ah_request *request)
{
    const struct ah_message *message = &request->message;
    struct ah_request *unexpected = find_unexpected(p2p, message);

    if (unexpected) {
        const struct ah_envelope_header header = {.tag = unexpected->message.tag,
                                                  .bytes = unexpected->message.bytes,
                                                  .source = unexpected->message.peer,
                                                  .dtype = unexpected->message.dtype,
                                                  .kind = unexpected->kind,
                                                  .id = unexpected->id};

        ah_request_unlink(unexpected);
        match(p2p, request, &header, unexpected->payload);
        free(unexpected);
        return;
    }
    ah_request_append(&p2p->posted_receives[message->peer == AH_ANY_SOURCE ? p2p->group->ranks : message->peer],
                      request);
}

/* Sending ------------------------------------------------------------------------------------------------- */

/* Put the envelope of a send into the target's mailbox; 0 if the ring is full. */
static int send_envelope(struct ah_p2p *p2p, struct ah_request *request)
{
    const struct ah_message *message = &request->message;
    const struct ah_envelope_header header = {.tag = message->tag,
                                              .bytes = message->bytes,
                                              .source = p2p->group->rank,
                                              .dtype = message->dtype,
                                              .kind = message->bytes <= AH_EAGER_BYTES ? AH_EAGER : AH_RTS,
                                              .id = request->id};

    if (!ah_mailbox_put(p2p->group, message->peer, &header, message->data))
        return 0;
    if (header.kind == AH_EAGER) {
        ah_request_complete(p2p, request, AH_OK, message->peer);
        return 1;
    }
    request->state = AH_RTS_SENT;
    ah_request_move(&p2p->awaiting_cts, request);
    return 1;
}

static void add_send(struct ah_p2p *p2p, struct ah_request *request)
{
    struct ah_request_list *before = &p2p->unsent[request->message.peer];

    request->id = p2p->id++;
    if (before->first || !send_envelope(p2p, request)) {
        ah_request_append(before, request);
        p2p->waiting_sends++;
    }
}

static size_t retry_sends(struct ah_p2p *p2p)
{
    size_t moved = 0;

    for (uint32_t rank = 0; p2p->waiting_sends != 0 && rank < p2p->group->ranks; rank++) {
        struct ah_request *request;

        while ((request = p2p->unsent[rank].first) != NULL) {
            /* send_envelope may move it to another list; `waiting_sends` counts only this one. */
            ah_request_unlink(request);
            p2p->waiting_sends--;
            if (!send_envelope(p2p, request)) {
                struct ah_request_list *list = &p2p->unsent[rank];

                request->list = list;
                request->previous = NULL;
                request->next = list->first;
                if (list->first)
                    list->first->previous = request;
                else
                    list->last = request;
                list->first = request;
                p2p->waiting_sends++;
                break;
            }
            moved++;
        }
    }
    return moved;
}

/* Both ---------------------------------------------------------------------------------------------------- */

void ah_request_start(struct ah_p2p *p2p, struct ah_request *request)
{
    request->order = p2p->order++;
    request->previous_active = p2p->last_active;
    if (p2p->last_active)
        p2p->last_active->next_active = request;
    p2p->last_active = request;
    if (request->message.sends)
        add_send(p2p, request);
    else
        add_receive(p2p, request);
}

size_t ah_p2p_poll(struct ah_p2p *p2p)
{
    size_t moved = drain_mailbox(p2p);

    if (p2p->waiting_sends != 0)
        moved += retry_sends(p2p);
    if (p2p->matched.first)
        moved += ah_p2p_grant(p2p);
    if (p2p->outgoing.first)
        moved += ah_p2p_copy_in(p2p);
    if (p2p->incoming.first)
        moved += ah_p2p_copy_out(p2p);
    return moved;
}

struct ah_p2p *ah_p2p_open(struct ah_group *group)
{
    struct ah_p2p *p2p = calloc(1, sizeof *p2p);
    pthread_condattr_t clock;

    if (!p2p)
        return NULL;
    p2p->group = group;
    p2p->mailbox = ah_mailbox_of(group, group->rank);
    p2p->posted_receives = calloc(group->ranks + 1, sizeof *p2p->posted_receives);
    p2p->unexpected = calloc(group->ranks, sizeof *p2p->unexpected);
    p2p->unsent = calloc(group->ranks, sizeof *p2p->unsent);
    p2p->pollfds = calloc(group->ranks, sizeof *p2p->pollfds);
    pthread_mutex_init(&p2p->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&p2p->work, &clock);
    pthread_condattr_destroy(&clock);
    if (p2p->posted_receives && p2p->unexpected && p2p->unsent && p2p->pollfds)
        return p2p;
    ah_p2p_free(p2p);
    return NULL;
}

void ah_p2p_free(struct ah_p2p *p2p)
{
    for (uint32_t rank = 0; p2p->unexpected && rank < p2p->group->ranks; rank++) {
        struct ah_request *unexpected;

        while ((unexpected = p2p->unexpected[rank].first) != NULL) {
            ah_request_unlink(unexpected);
            free(unexpected);
        }
    }
    free(p2p->posted_receives);
    free(p2p->unexpected);
    free(p2p->unsent);
    free(p2p->pollfds);
    pthread_cond_destroy(&p2p->work);
    pthread_mutex_destroy(&p2p->lock);
    free(p2p);
}
