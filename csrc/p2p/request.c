/* Lists of requests, and completion. */
#include "p2p/request.h"

void ah_request_append(struct ah_request_list *list, struct ah_request *request)
{
    request->list = list;
    request->next = NULL;
    request->previous = list->last;
    if (list->last)
        list->last->next = request;
    else
        list->first = request;
    list->last = request;
}

void ah_request_unlink(struct ah_request *request)
{
    struct ah_request_list *list = request->list;

    if (!list)
        return;
    if (request->previous)
        request->previous->next = request->next;
    else
        list->first = request->next;
    if (request->next)
        request->next->previous = request->previous;
    else
        list->last = request->previous;
    request->list = NULL;
}

void ah_request_move(struct ah_request_list *list, struct ah_request *request)
{
    ah_request_unlink(request);
    ah_request_append(list, request);
}

void ah_request_remove(struct ah_p2p *p2p, struct ah_request *request)
{
    if (request->list && request->message.sends && request->state == AH_POSTED)
        p2p->waiting_sends--;
    ah_request_unlink(request);
    if (request->next_active)
        request->next_active->previous_active = request->previous_active;
    else if (p2p->last_active == request)
        p2p->last_active = request->previous_active;
    if (request->previous_active)
        request->previous_active->next_active = request->next_active;
    request->next_active = request->previous_active = NULL;
}

void ah_request_report(struct ah_p2p *p2p, struct ah_request *request)
{
    ah_request_append(&p2p->finished, request);
    ah_p2p_wake_progress_thread(p2p);
}

void ah_request_complete(struct ah_p2p *p2p, struct ah_request *request, int code, uint32_t peer)
{
    ah_request_remove(p2p, request);
    request->state = AH_COMPLETE;
    request->outcome = (struct ah_outcome){.code = code, .peer = peer};
    if (request->posted) {
        p2p->posted--;
        p2p->posted_sends -= (size_t)request->message.sends;
        if (request->waiters == 0)
            ah_request_report(p2p, request);
    }
    atomic_store_explicit(&request->complete, 1, memory_order_release);
    /* Another thread of this process may sleep until this request is complete. */
    ah_mailbox_wake(p2p->group, p2p->group->rank);
}
