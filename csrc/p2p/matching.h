/* Messages from one rank to another: what a process does with the boxes of `inbox.h`.
 *
 * Order between two ranks is kept for each tag. A receive names its source or takes from anyone, in the order of
 * arrival. Small sends are over once they stand in the target's box, large ones once their last byte stands in a lane.
 * Any number of threads may call at once; whoever waits moves everyone's messages on. Nothing here touches the state of
 * collectives: both may run at the same time. */
#ifndef ALLHANDS_MAIL_H
#define ALLHANDS_MAIL_H

#include "shm/segment.h"

/* As source of a receive: whoever sends. */
#define AH_ANYONE UINT32_MAX

struct ah_mail;
struct ah_letter;

struct ah_message {
    unsigned char *data;
    size_t bytes;
    uint64_t tag;
    uint32_t dtype;
    uint32_t peer; /* the target of a send; the source of a receive, or AH_ANYONE */
    int sends;
};

/* How a message ended: an ah_outcome_code, and with AH_OK the other rank, else the one that it is about. */
struct ah_outcome {
    int code;
    uint32_t peer;
};

/* Called now and then by a thread that waits, without any lock; not 0 ends the waiting with AH_INTERRUPTED. */
struct ah_ear {
    int (*pulse)(void *context);
    void *context;
};

/* Still under way, beside the ah_outcome_code. */
enum { AH_UNDER_WAY = -1 };

/* One per rank and process. `group` stays the caller's and outlives it. NULL without memory. */
struct ah_mail *ah_mail_open(struct ah_group *group);

/* Nobody else may be in a call. Posted letters that were not dropped are forgotten, not freed. */
void ah_mail_free(struct ah_mail *mail);

/* Send or receive and wait for the end of it. A negative timeout waits for ever. `ear` may be NULL. */
struct ah_outcome ah_mail_do(struct ah_mail *mail, const struct ah_message *message, int64_t timeout_ns,
                             const struct ah_ear *ear);

/* Send or receive a small message if that needs no waiting, not even for a lock, but for some microseconds for one that is
 * on its way: 1 where it is done, with its outcome. */
int ah_mail_try(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome);

/* Begin to send or receive. Where it is over at once, `letter` is NULL; otherwise it is to be dropped. The caller keeps
 * the memory of the message until it is over. `key` is what `ah_mail_serve` calls it by. The timeout runs from the
 * first wait without a limit, or `ah_mail_due`: a receive may be posted long before anyone counts on it. */
struct ah_outcome ah_mail_post(struct ah_mail *mail, const struct ah_message *message, int64_t timeout_ns,
                               uint64_t key, struct ah_letter **letter);

/* Wait for the end of a letter at most `limit_ns` (negative: as long as it takes); AH_UNDER_WAY after that. */
struct ah_outcome ah_mail_wait(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns,
                               const struct ah_ear *ear);

/* Someone waits for the letter by other means. */
void ah_mail_due(struct ah_mail *mail, struct ah_letter *letter);

/* Move things on once and tell how a letter is. */
struct ah_outcome ah_mail_look(struct ah_mail *mail, struct ah_letter *letter);

/* Free a letter. One that is under way takes the group with it, unless nobody else knows of it yet: its memory is no
 * longer there. */
void ah_mail_drop(struct ah_mail *mail, struct ah_letter *letter);

/* Move posted letters on, whenever no other thread does, until some are over whose end nobody waited for: returns how
 * many keys of such it wrote, at most `most`; 0 once stopped. One thread at a time. */
size_t ah_mail_serve(struct ah_mail *mail, uint64_t *keys, size_t most);

/* End `ah_mail_serve`, and every letter of this rank that is under way, with AH_ABORTED. Others are not told. */
void ah_mail_stop(struct ah_mail *mail);

/* How many posted sends are under way. */
size_t ah_mail_unsent(struct ah_mail *mail);

#endif
