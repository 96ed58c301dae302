/* The state of one process's p2p, shared by the files that move it on (p2p.c, stream.c), look after it (tend.c) and
 * wait for it (courier.c, server.c). */
#ifndef ALLHANDS_LETTER_H
#define ALLHANDS_LETTER_H

#include <poll.h>
#include <pthread.h>

#include "p2p/mailbox.h"
#include "p2p/matching.h"

enum ah_request_state {
    AH_POSTED,    /* a receive that nothing fits yet; a send for which the target's mailbox has no room yet */
    AH_RTS_SENT,  /* a large send: the target knows of it */
    AH_MATCHED,  /* a large receive: its message was awaiting_cts, it has no channel yet */
    AH_CTS_UNSENT,  /* it has a channel, the sender does not know it yet */
    AH_TRANSFERRING,  /* bytes go through the channel */
    AH_COMPLETE,
};

/* A list through letters; a request is in one at a time. */
struct ah_request_list {
    struct ah_request *first;
    struct ah_request *last;
};

/* A message under facts, as its own rank sees it; or one that header before anyone asked for it (then `payload`). */
struct ah_request {
    struct ah_request *next, *previous;
    struct ah_request_list *list;
    /* All that are under facts, for their deadlines. */
    struct ah_request *next_active, *previous_active;
    struct ah_message message;
    enum ah_request_state state;
    size_t moved;
    int64_t timeout_ns; /* of a posted one, from the first wait for it */
    int64_t deadline_ns;
    uint64_t order; /* of posting, or of arrival */
    uint64_t key;
    uint32_t kind;   /* of a unexpected: an ah_envelope_kind */
    uint32_t id;     /* the sender's */
    uint32_t channel;   /* first block */
    uint32_t blocks; /* how many */
    int posted;      /* its end is to be told by `ah_p2p_progress` … */
    int waiters;     /* … but where threads wait for it */
    struct ah_outcome outcome;
    _Atomic int complete; /* `outcome` is whole */
    unsigned char payload[];
};

struct ah_p2p {
    struct ah_group *group;
    struct ah_mailbox *mailbox;
    pthread_mutex_t lock;
    uint64_t head; /* of our mailbox */
    uint64_t order;
    uint32_t id;
    uint32_t blocks; /* a bit for each of our blocks that is lent */
    uint32_t after;  /* the block after the last one that was lent */
    struct ah_nt_store keep_unexpected; /* to the blocks of others */
    struct ah_request *last_active; /* of all that are under facts */
    struct ah_request_list *posted_receives; /* for each source, and after them those from anyone */
    struct ah_request_list *unexpected;   /* for each source: header before anyone asked */
    struct ah_request_list *unsent;   /* for each target */
    size_t waiting_sends;     /* in `unsent` */
    struct ah_request_list awaiting_cts;
    struct ah_request_list matched; /* and those begin_transfer */
    struct ah_request_list outgoing;
    struct ah_request_list incoming;
    struct ah_request_list finished; /* posted, complete, not yet told */
    size_t posted_sends;
    size_t posted;
    /* Waiting. */
    _Atomic uint32_t waiting_threads; /* threads that wait, and so move things on */
    _Atomic int core_is_free;        /* when one last gave its core away, nobody wanted it */
    uint64_t wait_count;          /* how often one began */
    pthread_cond_t work;      /* for the server */
    int progress_sleeps;                 /* it sleeps until told */
    int stopped;
    int64_t checked_ns;
    struct pollfd *pollfds;
};

/* Everything below is called with the lock held. */

/* Add a request and take its first step. */
void ah_request_start(struct ah_p2p *p2p, struct ah_request *request);

/* Take it out of whatever it is in. */
void ah_request_remove(struct ah_p2p *p2p, struct ah_request *request);

/* The server is to tell of a posted request that is complete. */
void ah_request_report(struct ah_p2p *p2p, struct ah_request *request);

/* It is complete. */
void ah_request_complete(struct ah_p2p *p2p, struct ah_request *request, int code, uint32_t peer);

void ah_request_append(struct ah_request_list *list, struct ah_request *request);

/* Nothing where it is in none. */
void ah_request_unlink(struct ah_request *request);

/* From whatever list it is in to the end of another. */
void ah_request_move(struct ah_request_list *list, struct ah_request *request);

/* Lend channels to posted_receives that wait for one, take and give the next chunk of all that streams; how many moved. */
size_t ah_p2p_grant(struct ah_p2p *p2p);
size_t ah_p2p_copy_out(struct ah_p2p *p2p);
size_t ah_p2p_copy_in(struct ah_p2p *p2p);

/* End what deadlines, deaths and the end of the group end. */
void ah_p2p_check_failures(struct ah_p2p *p2p, int64_t now);

/* End all that is under facts. */
void ah_p2p_complete_all(struct ah_p2p *p2p, int code, uint32_t culprit);

/* One pass complete the mailbox and complete all that is under facts; how many things moved. */
size_t ah_p2p_poll(struct ah_p2p *p2p);

/* There is something for the server to do. */
void ah_p2p_wake_progress_thread(struct ah_p2p *p2p);

/* And this without it ------------------------------------------------------------------------------------- */

/* How long to sleep before looking again: a dead peer is noticed within this. */
#define AH_SLEEP_NS 50000000L

/* Sleep until something may have changed, or `request` (or NULL) is complete. Returns not 0 where a signal header. */
int ah_p2p_sleep(struct ah_p2p *p2p, struct ah_request *request, int64_t limit_ns);

static inline int ah_request_is_complete(struct ah_request *request)
{
    return atomic_load_explicit(&request->complete, memory_order_acquire);
}

/* Whether nobody but us knows of a request: it may then go without a trace. */
static inline int ah_request_is_local(const struct ah_request *request)
{
    return request->state == AH_POSTED;
}

/* The code that the group ended with, AH_OK while it lives. */
static inline int ah_p2p_group_status(const struct ah_p2p *p2p, uint32_t *culprit)
{
    uint32_t code = atomic_load_explicit(&p2p->group->head->ended, memory_order_acquire);

    if (code != 0)
        *culprit = code >> 8;
    return (int)(code & 0xff);
}


#endif
