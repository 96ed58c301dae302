/* Moving on what was posted and nobody waits for, in a thread that the caller gives. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "p2p/request.h"

/* The server leaves letters to a thread that waits, and takes them up when none did for this long. A caller that
 * issues several operations and then waits for them is not disturbed, and the server need not be woken for each. */
#define TICK_NS 200000L

/* Ticks after which it tells of what is over, even where a thread waits for something else: that may be long. */
#define LATE_TICKS 5

/* Ticks without anything to do after which the server sleeps until it is told. */
#define WARM_TICKS 50

void ah_mail_call_server(struct ah_mail *mail)
{
    if (mail->cold) {
        mail->cold = 0;
        pthread_cond_signal(&mail->work);
    }
}

static size_t collect(struct ah_mail *mail, uint64_t *keys, size_t most)
{
    size_t number = 0;

    for (struct ah_letter *letter; number < most && (letter = mail->finished.first) != NULL; number++) {
        keys[number] = letter->key;
        ah_letter_remove(mail, letter);
    }
    return number;
}

/* Wait until there may be work: until told, or for a tick where there was some lately. */
static void rest(struct ah_mail *mail)
{
    if (mail->cold) {
        pthread_cond_wait(&mail->work, &mail->lock);
    } else {
        int64_t until = ah_now_ns() + TICK_NS;
        const struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

        pthread_cond_timedwait(&mail->work, &mail->lock, &at);
    }
}

size_t ah_mail_serve(struct ah_mail *mail, uint64_t *keys, size_t most)
{
    uint64_t shifts;
    uint32_t looks = 0, idle = 0, late = 0;
    size_t number = 0;

    pthread_mutex_lock(&mail->lock);
    shifts = mail->shifts - 1; /* one tick at least, for callers that wait at once */
    while (!mail->stopped) {
        int busy = atomic_load(&mail->drivers) != 0 || shifts != mail->shifts;

        shifts = mail->shifts;
        if (mail->finished.first && (!busy || late++ >= LATE_TICKS)) {
            number = collect(mail, keys, most);
            break;
        }
        if (busy || (mail->posted == 0 && !mail->finished.first)) {
            looks = 0;
            /* Also while one thread waits for long: it says when it leaves something behind. */
            mail->cold = idle > WARM_TICKS && !mail->finished.first;
            rest(mail);
            idle = shifts == mail->shifts ? idle + 1 : 0;
            continue;
        }
        idle = 0;
        if (ah_mail_pass(mail) != 0)
            looks = 0;
        else
            looks++;
        if (looks <= mail->group->yields) {
            pthread_mutex_unlock(&mail->lock);
            if (looks != 0)
                sched_yield();
        } else {
            int told;

            ah_mail_tend(mail, ah_now_ns());
            told = mail->finished.first != NULL;
            pthread_mutex_unlock(&mail->lock);
            if (!told)
                ah_mail_nap(mail, NULL, AH_NAP_NS);
        }
        pthread_mutex_lock(&mail->lock);
    }
    mail->cold = 0;
    pthread_mutex_unlock(&mail->lock);
    return number;
}

void ah_mail_stop(struct ah_mail *mail)
{
    pthread_mutex_lock(&mail->lock);
    mail->stopped = 1;
    ah_mail_end_all(mail, AH_ABORTED, mail->group->rank);
    pthread_cond_signal(&mail->work);
    pthread_mutex_unlock(&mail->lock);
    ah_ring(mail->group, mail->group->rank);
}

size_t ah_mail_unsent(struct ah_mail *mail)
{
    size_t number;

    pthread_mutex_lock(&mail->lock);
    number = mail->posted_sends;
    pthread_mutex_unlock(&mail->lock);
    return number;
}
