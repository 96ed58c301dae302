/* Messages from one rank to another: what a process does with the boxes of `inbox.h`.
 *
 * Order between two ranks is kept for each tag. A receive names its source or takes from anyone, in the order of
 * arrival. Small sends are complete once they stand in the target's mailbox, large ones once their last byte stands in a channel.
 * Any number of threads may call at once; whoever waits moves everyone's messages on. Nothing here touches the state of
 * collectives: both may run at the same time. */
#ifndef ALLHANDS_MAIL_H
#define ALLHANDS_MAIL_H

#include "shm/segment.h"

/* As source of a receive: whoever sends. */
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

/* How a message ended: an ah_outcome_code, and with AH_OK the other rank, else the one that it is about. */
struct ah_outcome {
    int code;
    uint32_t peer;
};

/* Called now and then by a thread that waits, without any lock; not 0 ends the waiting with AH_INTERRUPTED. */
struct ah_interrupt {
    int (*check_interrupt)(void *context);
    void *context;
};

/* Still under facts, beside the ah_outcome_code. */
enum { AH_PENDING = -1 };

/* One per rank and process. `group` stays the caller's and outlives it. NULL without memory. */
struct ah_p2p *ah_p2p_open(struct ah_group *group);

/* Nobody else may be in a call. Posted letters that were not dropped are forgotten, not freed. */
void ah_p2p_free(struct ah_p2p *p2p);

/* Send or receive and wait for the end of it. A negative timeout waits for ever. `interrupt` may be NULL. */
struct ah_outcome ah_p2p_run(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                             const struct ah_interrupt *interrupt);

/* Send or receive a small message if that needs no waiting, not even for a lock, but for some microseconds for one that is
 * on its facts: 1 where it is done, with its outcome. */
int ah_p2p_try(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome);

/* Begin to send or receive. Where it is complete at once, `request` is NULL; otherwise it is to be dropped. The caller keeps
 * the memory of the message until it is complete. `key` is what `ah_p2p_progress` calls it by. The timeout runs from the
 * first wait without a limit, or `ah_p2p_start_timeout`: a receive may be posted long before anyone counts on it. */
struct ah_outcome ah_p2p_post(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                               uint64_t key, struct ah_request **request);

/* Wait for the end of a request at most `limit_ns` (negative: as long as it takes); AH_PENDING after that. */
struct ah_outcome ah_p2p_wait(struct ah_p2p *p2p, struct ah_request *request, int64_t limit_ns,
                               const struct ah_interrupt *interrupt);

/* Someone waits for the request by other means. */
void ah_p2p_start_timeout(struct ah_p2p *p2p, struct ah_request *request);

/* Move things on once and tell how a request is. */
struct ah_outcome ah_p2p_test(struct ah_p2p *p2p, struct ah_request *request);

/* Free a request. One that is under facts takes the group with it, unless nobody else knows of it yet: its memory is no
 * longer there. */
void ah_p2p_free_request(struct ah_p2p *p2p, struct ah_request *request);

/* Move posted letters on, whenever no other thread does, until some are complete whose end nobody waited for: returns how
 * many keys of such it wrote, at most `most`; 0 once stopped. One thread at a time. */
size_t ah_p2p_progress(struct ah_p2p *p2p, uint64_t *keys, size_t most);

/* End `ah_p2p_progress`, and every request of this rank that is under facts, with AH_ABORTED. Others are not told. */
void ah_p2p_stop(struct ah_p2p *p2p);

/* How many posted sends are under facts. */
size_t ah_p2p_pending_sends(struct ah_p2p *p2p);

#endif
