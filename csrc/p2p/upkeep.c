/* What ends messages from outside: deadlines, the deaths of processes, the end of the group. */
#define _GNU_SOURCE
#include <time.h>

#include "p2p/request.h"
#include "shm/wait.h"

/* How often to look at processes and signals while bells ring or things move. */
#define TEND_NS 10000000L

int64_t ah_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void ah_mail_end_all(struct ah_mail *mail, int code, uint32_t culprit)
{
    while (mail->latest)
        ah_letter_end(mail, mail->latest, code, culprit);
}

/* Deadlines ----------------------------------------------------------------------------------------------- */

static void expire(struct ah_mail *mail, int64_t now)
{
    for (struct ah_letter *letter = mail->latest, *next; letter; letter = next) {
        uint32_t peer = letter->message.peer == AH_ANYONE ? mail->group->rank : letter->message.peer;

        next = letter->earlier;
        if (now < letter->deadline_ns)
            continue;
        if (!ah_is_private(letter)) {
            ah_end(mail->group, AH_TIMEOUT, peer);
            ah_ring_all(mail->group);
        }
        ah_letter_end(mail, letter, AH_TIMEOUT, peer);
    }
}

/* Deaths -------------------------------------------------------------------------------------------------- */

/* Look at the processes that letters wait for; how many of them are gone. */
static int look_at_peers(struct ah_mail *mail)
{
    const struct ah_group *group = mail->group;
    int anyone = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++)
        mail->looks[rank] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (struct ah_letter *letter = mail->latest; letter; letter = letter->earlier) {
        if (letter->message.peer == AH_ANYONE)
            anyone = 1;
        else
            mail->looks[letter->message.peer].fd = group->pidfds[letter->message.peer];
    }
    for (uint32_t rank = 0; anyone && rank < group->ranks; rank++)
        mail->looks[rank].fd = group->pidfds[rank];
    return poll(mail->looks, group->ranks, 0);
}

/* A receive from anyone waits in vain only where everyone else is gone: a rank may leave in good order. */
static int everyone_is_gone(const struct ah_mail *mail)
{
    for (uint32_t rank = 0; rank < mail->group->ranks; rank++) {
        if (rank != mail->group->rank && mail->looks[rank].revents == 0)
            return 0;
    }
    return mail->group->ranks > 1;
}

static void bury(struct ah_mail *mail)
{
    int alone = everyone_is_gone(mail);

    /* What they had sent before they went still counts. */
    while (ah_mail_pass(mail) != 0)
        continue;
    for (struct ah_letter *letter = mail->latest, *next; letter; letter = next) {
        uint32_t peer = letter->message.peer;

        next = letter->earlier;
        if (peer == AH_ANYONE ? !alone : mail->looks[peer].revents == 0)
            continue;
        if (peer == AH_ANYONE)
            peer = mail->group->rank == 0 ? 1 : 0;
        ah_end(mail->group, AH_DEAD, peer);
        ah_ring_all(mail->group);
        ah_letter_end(mail, letter, AH_DEAD, peer);
    }
}

/* Look at all that may end letters from outside. */
void ah_mail_tend(struct ah_mail *mail, int64_t now)
{
    uint32_t culprit;
    int code;

    if (!mail->latest)
        return;
    if ((code = ah_group_ended(mail, &culprit)) != 0) {
        while (ah_mail_pass(mail) != 0)
            continue;
        ah_mail_end_all(mail, code, culprit);
        return;
    }
    expire(mail, now);
    if (now - mail->tended_ns < TEND_NS)
        return;
    mail->tended_ns = now;
    if (look_at_peers(mail) > 0)
        bury(mail);
}
