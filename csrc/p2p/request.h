/* The state of one process's mail, shared by the files that move it on (mail.c, stream.c), look after it (tend.c) and
 * wait for it (courier.c, server.c). */
#ifndef ALLHANDS_LETTER_H
#define ALLHANDS_LETTER_H

#include <poll.h>
#include <pthread.h>

#include "p2p/mailbox.h"
#include "p2p/matching.h"

enum ah_state {
    AH_WAITS,    /* a receive that nothing fits yet; a send for which the target's box has no room yet */
    AH_OFFERED,  /* a large send: the target knows of it */
    AH_MATCHED,  /* a large receive: its message was offered, it has no lane yet */
    AH_GRANTED,  /* it has a lane, the sender does not know it yet */
    AH_STREAMS,  /* bytes go through the lane */
    AH_OVER,
};

/* A list through letters; a letter is in one at a time. */
struct ah_list {
    struct ah_letter *first;
    struct ah_letter *last;
};

/* A message under way, as its own rank sees it; or one that came before anyone asked for it (then `stored`). */
struct ah_letter {
    struct ah_letter *next, *previous;
    struct ah_list *list;
    /* All that are under way, for their deadlines. */
    struct ah_letter *later, *earlier;
    struct ah_message message;
    enum ah_state state;
    size_t moved;
    int64_t timeout_ns; /* of a posted one, from the first wait for it */
    int64_t deadline_ns;
    uint64_t order; /* of posting, or of arrival */
    uint64_t key;
    uint32_t kind;   /* of a stray: an ah_envelope_kind */
    uint32_t id;     /* the sender's */
    uint32_t lane;   /* first block */
    uint32_t blocks; /* how many */
    int posted;      /* its end is to be told by `ah_mail_serve` … */
    int awaited;     /* … but where threads wait for it */
    struct ah_outcome outcome;
    _Atomic int over; /* `outcome` is whole */
    unsigned char stored[];
};

struct ah_mail {
    struct ah_group *group;
    struct ah_box *box;
    pthread_mutex_t lock;
    uint64_t head; /* of our box */
    uint64_t order;
    uint32_t id;
    uint32_t blocks; /* a bit for each of our blocks that is lent */
    uint32_t after;  /* the block after the last one that was lent */
    struct ah_store store; /* to the blocks of others */
    struct ah_letter *latest; /* of all that are under way */
    struct ah_list *receives; /* for each source, and after them those from anyone */
    struct ah_list *strays;   /* for each source: came before anyone asked */
    struct ah_list *unsent;   /* for each target */
    size_t waiting_sends;     /* in `unsent` */
    struct ah_list offered;
    struct ah_list matched; /* and those granted */
    struct ah_list outgoing;
    struct ah_list incoming;
    struct ah_list finished; /* posted, over, not yet told */
    size_t posted_sends;
    size_t posted;
    /* Waiting. */
    _Atomic uint32_t drivers; /* threads that wait, and so move things on */
    _Atomic int alone;        /* when one last gave its core away, nobody wanted it */
    uint64_t shifts;          /* how often one began */
    pthread_cond_t work;      /* for the server */
    int cold;                 /* it sleeps until told */
    int stopped;
    int64_t tended_ns;
    struct pollfd *looks;
};

/* Everything below is called with the lock held. */

/* Add a letter and take its first step. */
void ah_letter_add(struct ah_mail *mail, struct ah_letter *letter);

/* Take it out of whatever it is in. */
void ah_letter_remove(struct ah_mail *mail, struct ah_letter *letter);

/* The server is to tell of a posted letter that is over. */
void ah_letter_tell(struct ah_mail *mail, struct ah_letter *letter);

/* It is over. */
void ah_letter_end(struct ah_mail *mail, struct ah_letter *letter, int code, uint32_t peer);

void ah_list_append(struct ah_list *list, struct ah_letter *letter);

/* Nothing where it is in none. */
void ah_list_take_out(struct ah_letter *letter);

/* From whatever list it is in to the end of another. */
void ah_list_move(struct ah_list *list, struct ah_letter *letter);

/* Lend lanes to receives that wait for one, take and give the next chunk of all that streams; how many moved. */
size_t ah_mail_grant(struct ah_mail *mail);
size_t ah_mail_take(struct ah_mail *mail);
size_t ah_mail_give(struct ah_mail *mail);

/* End what deadlines, deaths and the end of the group end. */
void ah_mail_tend(struct ah_mail *mail, int64_t now);

/* End all that is under way. */
void ah_mail_end_all(struct ah_mail *mail, int code, uint32_t culprit);

/* One pass over the box and over all that is under way; how many things moved. */
size_t ah_mail_pass(struct ah_mail *mail);

/* There is something for the server to do. */
void ah_mail_call_server(struct ah_mail *mail);

/* And this without it ------------------------------------------------------------------------------------- */

/* How long to sleep before looking again: a dead peer is noticed within this. */
#define AH_NAP_NS 50000000L

/* Sleep until something may have changed, or `letter` (or NULL) is over. Returns not 0 where a signal came. */
int ah_mail_nap(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns);

static inline int ah_is_over(struct ah_letter *letter)
{
    return atomic_load_explicit(&letter->over, memory_order_acquire);
}

/* Whether nobody but us knows of a letter: it may then go without a trace. */
static inline int ah_is_private(const struct ah_letter *letter)
{
    return letter->state == AH_WAITS;
}

/* The code that the group ended with, AH_OK while it lives. */
static inline int ah_group_ended(const struct ah_mail *mail, uint32_t *culprit)
{
    uint32_t code = atomic_load_explicit(&mail->group->head->ended, memory_order_acquire);

    if (code != 0)
        *culprit = code >> 8;
    return (int)(code & 0xff);
}

/* On CLOCK_MONOTONIC. */
int64_t ah_now_ns(void);

#endif
