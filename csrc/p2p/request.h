/* The state of one process's messages: shared by matching.c, rendezvous.c and progress.c. */
#ifndef ALLHANDS_REQUEST_H
#define ALLHANDS_REQUEST_H

#include <poll.h>
#include <pthread.h>

#include "p2p/mailbox.h"
#include "p2p/matching.h"

enum ah_request_state {
    AH_POSTED,       /* a receive without a match; a send whose target mailbox has no room yet */
    AH_RTS_SENT,     /* a large send that waits for its CTS */
    AH_MATCHED,      /* a large receive whose RTS has arrived and that has no channel yet */
    AH_CTS_UNSENT,   /* a large receive with a channel, whose CTS is not sent yet */
    AH_TRANSFERRING, /* bytes move through the channel */
    AH_COMPLETE,
};

/* A doubly linked list; a request is in at most one. */
struct ah_request_list {
    struct ah_request *first;
    struct ah_request *last;
};

/* A send or receive of this rank, or an unexpected message: one that arrived before its receive was posted. */
struct ah_request {
    struct ah_request *next, *previous;
    struct ah_request_list *list;
    struct ah_request *next_active, *previous_active; /* all that are not complete, for deadlines */
    struct ah_message message;
    enum ah_request_state state;
    size_t moved;       /* bytes copied so far */
    int64_t timeout_ns; /* of a posted request: it starts with the first wait */
    int64_t deadline_ns;
    uint64_t order; /* of posting or arrival */
    uint64_t key;
    uint32_t kind;    /* of an unexpected message: enum ah_envelope_kind */
    uint32_t id;      /* the sender's */
    uint32_t channel; /* first block */
    uint32_t blocks;  /* number of blocks */
    int posted;       /* ah_p2p_progress reports its completion, unless threads wait for it */
    int waiters;      /* number of those threads */
    struct ah_outcome outcome;
    _Atomic int complete;    /* set after `outcome` */
    unsigned char payload[]; /* of an unexpected eager message */
};

struct ah_p2p {
    struct ah_group *group;
    struct ah_mailbox *mailbox; /* our own */
    pthread_mutex_t lock;
    uint64_t head; /* next position of our mailbox to read */
    uint64_t order;
    uint32_t id;
    uint32_t blocks;                         /* bitmap of our blocks that are in use */
    uint32_t after;                          /* the block after the one allocated last */
    struct ah_nt_store nt_store;             /* for copies to other ranks' blocks */
    struct ah_request *last_active;          /* newest request that is not complete */
    struct ah_request_list *posted_receives; /* per source, and one more for AH_ANY_SOURCE */
    struct ah_request_list *unexpected;      /* per source */
    struct ah_request_list *unsent;          /* per target */
    size_t waiting_sends;                    /* length of all `unsent` */
    struct ah_request_list awaiting_cts;
    struct ah_request_list matched; /* AH_MATCHED and AH_CTS_UNSENT */
    struct ah_request_list outgoing;
    struct ah_request_list incoming;
    struct ah_request_list finished; /* posted, complete, not reported yet */
    size_t posted_sends;
    size_t posted;
    _Atomic uint32_t waiting_threads; /* they poll all requests */
    _Atomic int core_is_free;         /* the last sched_yield returned at once */
    uint64_t wait_count;              /* how many waits have begun */
    pthread_cond_t work;              /* wakes the progress thread */
    int progress_sleeps;              /* the progress thread sleeps until it is woken */
    int stopped;
    int64_t checked_ns; /* when peers were last polled */
    struct pollfd *pollfds;
};

/* The functions below are called with the lock held. */

/* Add a request: match it or send its envelope if that is possible now. */
void ah_request_start(struct ah_p2p *p2p, struct ah_request *request);

/* Remove it from all lists. */
void ah_request_remove(struct ah_p2p *p2p, struct ah_request *request);

/* Let the progress thread report a complete posted request. */
void ah_request_report(struct ah_p2p *p2p, struct ah_request *request);

/* Complete it with an outcome and wake the threads that wait for it. */
void ah_request_complete(struct ah_p2p *p2p, struct ah_request *request, int code, uint32_t peer);

void ah_request_append(struct ah_request_list *list, struct ah_request *request);

/* Does nothing if it is in no list. */
void ah_request_unlink(struct ah_request *request);

/* Move it to the end of another list. */
void ah_request_move(struct ah_request_list *list, struct ah_request *request);

/* Allocate channels and send CTS; copy the next chunk of each transfer out and in. Each returns how many requests
 * moved. */
size_t ah_p2p_grant(struct ah_p2p *p2p);
size_t ah_p2p_copy_out(struct ah_p2p *p2p);
size_t ah_p2p_copy_in(struct ah_p2p *p2p);

/* Poll the mailbox and all requests once; returns how many moved. */
size_t ah_p2p_poll(struct ah_p2p *p2p);

/* Wake the progress thread. */
void ah_p2p_wake_progress_thread(struct ah_p2p *p2p);

#endif
