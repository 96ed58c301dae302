/* Messages between two ranks, over the mailboxes of `mailbox.h`.
 *
 * Messages between two ranks with the same tag arrive in order. A receive names its source or accepts any, in order
 * of arrival. A small send is complete when its envelope is in the target's mailbox, a large one when its last byte
 * is in the channel. Any number of threads may call at once; a thread that waits progresses all requests of the rank.
 * The state of collectives is separate: both may run at the same time. */
#ifndef ALLHANDS_MATCHING_H
#define ALLHANDS_MATCHING_H

#include "shm/segment.h"

/* Source of a receive that accepts any sender. */
#define AH_ANY_SOURCE UINT32_MAX

struct ah_p2p;
struct ah_request;

struct ah_message {
    unsigned char *data;
    size_t bytes;
    uint64_t tag;
    uint32_t dtype;
    uint32_t peer; /* the target of a send; the source of a receive, or AH_ANY_SOURCE */
    int sends;
};

/* Outcome of a message: with AH_OK `peer` is the other rank, else the culprit. */
struct ah_outcome {
    int code;
    uint32_t peer;
};

/* Called periodically by a waiting thread that holds no lock; nonzero ends the wait with AH_INTERRUPTED. */
struct ah_interrupt {
    int (*check_interrupt)(void *context);
    void *context;
};

/* Not complete; returned besides the outcome codes. */
enum { AH_PENDING = -1 };

/* One per rank and process. `group` must outlive it. NULL without memory. */
struct ah_p2p *ah_p2p_open(struct ah_group *group);

/* No other thread may be in a call. Posted requests that were not freed stay allocated. */
void ah_p2p_free(struct ah_p2p *p2p);

/* Send or receive and wait for completion. A negative timeout waits for ever. `interrupt` may be NULL. */
struct ah_outcome ah_p2p_run(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                             const struct ah_interrupt *interrupt);

/* Send or receive a small message without blocking, beyond a few microseconds of polling. Returns 1 if it is
 * complete. */
int ah_p2p_try(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome);

/* Post a send or receive. If it completes at once, `request` is NULL; otherwise the caller frees it and keeps the
 * message's memory until it is complete. `ah_p2p_progress` returns `key` for it. The timeout starts with the first
 * wait without a limit or with `ah_p2p_start_timeout`, because a receive may be posted long before it is needed. */
struct ah_outcome ah_p2p_post(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                               uint64_t key, struct ah_request **request);

/* Wait for completion at most `limit_ns` (negative: no limit); AH_PENDING after that. */
struct ah_outcome ah_p2p_wait(struct ah_p2p *p2p, struct ah_request *request, int64_t limit_ns,
                               const struct ah_interrupt *interrupt);

/* Start the timeout: the caller waits by other means. */
void ah_p2p_start_timeout(struct ah_p2p *p2p, struct ah_request *request);

/* Poll once and return the request's state. */
struct ah_outcome ah_p2p_test(struct ah_p2p *p2p, struct ah_request *request);

/* Free a request. If a peer knows of an incomplete one, the group ends, because its memory is gone. */
void ah_p2p_free_request(struct ah_p2p *p2p, struct ah_request *request);

/* Progress posted requests while no thread waits, until some are complete that no thread waited for. Writes at most
 * `most` of their keys and returns how many; 0 once stopped. One thread at a time. */
size_t ah_p2p_progress(struct ah_p2p *p2p, uint64_t *keys, size_t most);

/* End `ah_p2p_progress`, and complete all requests of this rank with AH_ABORTED. Peers are not notified. */
void ah_p2p_stop(struct ah_p2p *p2p);

/* Number of posted sends that are not complete. */
size_t ah_p2p_pending_sends(struct ah_p2p *p2p);

#endif
