/* Waiting for messages: whoever waits moves all of this rank's messages on, sleeps when nothing moves, and looks at
 * deadlines, at the end of the group and at whether the awaited processes live. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "letter.h"
#include "wait.h"

/* How long to sleep before looking again: a dead peer is noticed within this. */
#define NAP_NS 50000000L

/* How often to look at processes and signals while bells ring or things move. */
#define TEND_NS 10000000L

/* The server leaves letters to a thread that waits, and takes them up when none did for this long. A caller that
 * issues several operations and then waits for them is not disturbed, and the server need not be woken for each. */
#define TICK_NS 200000L

/* Ticks without anything to do after which the server sleeps until it is told. */
#define WARM_TICKS 50

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int is_over(struct ah_letter *letter)
{
    return atomic_load_explicit(&letter->over, memory_order_acquire);
}

static int group_ended(struct ah_mail *mail, uint32_t *culprit)
{
    uint32_t code = atomic_load_explicit(&mail->group->head->ended, memory_order_acquire);

    if (code != 0)
        *culprit = atomic_load(&mail->group->head->culprit);
    return (int)code;
}

/* Whether nobody but us knows of a letter: it may then go without a trace. */
static int is_private(const struct ah_letter *letter)
{
    return letter->state == AH_WAITS;
}

static void end_all(struct ah_mail *mail, int code, uint32_t culprit)
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
        if (!is_private(letter)) {
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
static void tend(struct ah_mail *mail, int64_t now)
{
    uint32_t culprit;
    int code;

    if (!mail->latest)
        return;
    if ((code = group_ended(mail, &culprit)) != 0) {
        while (ah_mail_pass(mail) != 0)
            continue;
        end_all(mail, code, culprit);
        return;
    }
    expire(mail, now);
    if (now - mail->tended_ns < TEND_NS)
        return;
    mail->tended_ns = now;
    if (look_at_peers(mail) > 0)
        bury(mail);
}

/* Waiting ------------------------------------------------------------------------------------------------- */

/* Sleep until something may have changed. Returns not 0 where a signal came. */
static int nap(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns)
{
    struct ah_box *box = mail->box;
    uint32_t bell;
    size_t moved;
    int signalled = 0;

    atomic_fetch_add(&box->sleeping, 1);
    bell = atomic_load(&box->bell);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&mail->lock);
    moved = ah_mail_pass(mail);
    if (mail->stopped)
        moved++;
    pthread_mutex_unlock(&mail->lock);
    if (moved == 0 && !(letter && is_over(letter)))
        signalled = ah_sleep(box, bell, limit_ns);
    atomic_fetch_sub(&box->sleeping, 1);
    return signalled;
}

/* Move things on until `letter` is over, or `until_ns` is past; not 0 where the ear heard something. */
static int drive(struct ah_mail *mail, struct ah_letter *letter, int64_t until_ns, const struct ah_ear *ear)
{
    const uint32_t spins = mail->group->spins, patience = spins + mail->group->yields;
    uint32_t looks = 0, moves = 0;
    int64_t now, heard_ns = 0;

    while (!is_over(letter)) {
        size_t moved = 0;
        int signalled = 0;

        if (pthread_mutex_trylock(&mail->lock) == 0) {
            moved = ah_mail_pass(mail);
            pthread_mutex_unlock(&mail->lock);
        }
        if (moved != 0) {
            looks = 0;
            if (++moves % 64 != 0)
                continue;
        } else if (looks < patience) {
            if (looks++ < spins)
                relax();
            else
                sched_yield();
            continue;
        }
        now = now_ns();
        pthread_mutex_lock(&mail->lock);
        tend(mail, now);
        pthread_mutex_unlock(&mail->lock);
        if (is_over(letter) || now >= until_ns)
            break;
        if (moved == 0) {
            int64_t limit = until_ns - now < NAP_NS ? until_ns - now : NAP_NS;

            if (letter->deadline_ns - now < limit)
                limit = letter->deadline_ns > now ? letter->deadline_ns - now : 1;
            signalled = nap(mail, letter, limit);
        }
        if (heard_ns == 0)
            heard_ns = now;
        if (ear && !is_over(letter) && (signalled || now - heard_ns >= NAP_NS)) {
            heard_ns = now;
            if (ear->pulse(ear->context) != 0)
                return 1;
        }
    }
    return 0;
}

static void begin_shift(struct ah_mail *mail)
{
    atomic_fetch_add(&mail->drivers, 1);
    mail->shifts++;
}

/* With the lock held. What is left goes to the server. */
static void end_shift(struct ah_mail *mail)
{
    atomic_fetch_sub(&mail->drivers, 1);
    if (mail->cold && (mail->posted != 0 || mail->finished.first)) {
        mail->cold = 0;
        pthread_cond_signal(&mail->work);
    }
}

/* With the lock held: why nothing can be sent or received at all. */
static int refused(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    outcome->code = group_ended(mail, &outcome->peer);
    if (outcome->code == AH_OK && mail->stopped)
        *outcome = (struct ah_outcome){.code = AH_ABORTED, .peer = mail->group->rank};
    if (outcome->code == AH_OK && message->peer >= mail->group->ranks && (message->sends || message->peer != AH_ANYONE))
        *outcome = (struct ah_outcome){.code = AH_BROKEN, .peer = mail->group->rank};
    return outcome->code != AH_OK;
}

static void prepare(struct ah_letter *letter, const struct ah_message *message, int64_t timeout_ns)
{
    memset(letter, 0, sizeof *letter);
    letter->message = *message;
    letter->deadline_ns = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
}

/* Forget a letter whose memory goes. */
static void forget(struct ah_mail *mail, struct ah_letter *letter)
{
    if (!is_over(letter)) {
        if (!is_private(letter)) {
            ah_end(mail->group, AH_ABORTED, mail->group->rank);
            ah_ring_all(mail->group);
        }
        if (letter->posted) {
            mail->posted--;
            mail->posted_sends -= (size_t)letter->message.sends;
        }
    }
    ah_letter_remove(mail, letter);
}

struct ah_outcome ah_mail_do(struct ah_mail *mail, const struct ah_message *message, int64_t timeout_ns,
                             const struct ah_ear *ear)
{
    struct ah_outcome outcome;
    struct ah_letter letter;

    prepare(&letter, message, timeout_ns);
    pthread_mutex_lock(&mail->lock);
    if (refused(mail, message, &outcome)) {
        pthread_mutex_unlock(&mail->lock);
        return outcome;
    }
    ah_letter_add(mail, &letter);
    if (!is_over(&letter)) {
        int heard;

        begin_shift(mail);
        pthread_mutex_unlock(&mail->lock);
        heard = drive(mail, &letter, INT64_MAX, ear);
        pthread_mutex_lock(&mail->lock);
        end_shift(mail);
        if (heard)
            letter.outcome = (struct ah_outcome){.code = AH_INTERRUPTED, .peer = mail->group->rank};
        forget(mail, &letter);
    }
    pthread_mutex_unlock(&mail->lock);
    return letter.outcome;
}

int ah_mail_try(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    struct ah_cover cover = {.tag = message->tag,
                             .bytes = message->bytes,
                             .source = mail->group->rank,
                             .dtype = message->dtype,
                             .kind = AH_WHOLE};
    int done = 0;

    if (!message->sends || message->bytes > AH_EAGER_BYTES || message->peer >= mail->group->ranks ||
        pthread_mutex_trylock(&mail->lock) != 0)
        return 0;
    if (refused(mail, message, outcome))
        done = 1;
    else if (!mail->unsent[message->peer].first && ah_inbox_put(mail->group, message->peer, &cover, message->data)) {
        *outcome = (struct ah_outcome){.code = AH_OK, .peer = message->peer};
        done = 1;
    }
    pthread_mutex_unlock(&mail->lock);
    return done;
}

struct ah_outcome ah_mail_post(struct ah_mail *mail, const struct ah_message *message, int64_t timeout_ns,
                               uint64_t key, struct ah_letter **posted)
{
    struct ah_outcome outcome;
    struct ah_letter *letter;

    *posted = NULL;
    letter = malloc(sizeof *letter);
    if (!letter)
        return (struct ah_outcome){.code = AH_BROKEN, .peer = mail->group->rank};
    prepare(letter, message, timeout_ns);
    letter->key = key;
    pthread_mutex_lock(&mail->lock);
    if (refused(mail, message, &outcome)) {
        pthread_mutex_unlock(&mail->lock);
        free(letter);
        return outcome;
    }
    ah_letter_add(mail, letter);
    if (!is_over(letter) && !message->sends)
        ah_mail_pass(mail);
    outcome = letter->outcome;
    if (!is_over(letter)) {
        outcome.code = AH_UNDER_WAY;
        letter->posted = 1;
        mail->posted++;
        mail->posted_sends += (size_t)message->sends;
        mail->shifts++;
        if (mail->cold) {
            mail->cold = 0;
            pthread_cond_signal(&mail->work);
        }
        *posted = letter;
    }
    pthread_mutex_unlock(&mail->lock);
    if (!*posted)
        free(letter);
    return outcome;
}

/* With the lock held: whoever asked for its end need not be told by the server. */
static struct ah_outcome outcome_of(struct ah_mail *mail, struct ah_letter *letter)
{
    if (!is_over(letter))
        return (struct ah_outcome){.code = AH_UNDER_WAY};
    ah_letter_remove(mail, letter);
    return letter->outcome;
}

struct ah_outcome ah_mail_wait(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns,
                               const struct ah_ear *ear)
{
    struct ah_outcome outcome;
    int heard = 0;

    if (!is_over(letter)) {
        pthread_mutex_lock(&mail->lock);
        begin_shift(mail);
        pthread_mutex_unlock(&mail->lock);
        heard = drive(mail, letter, limit_ns < 0 ? INT64_MAX : now_ns() + limit_ns, ear);
        pthread_mutex_lock(&mail->lock);
        end_shift(mail);
    } else {
        pthread_mutex_lock(&mail->lock);
        mail->shifts++;
    }
    outcome = outcome_of(mail, letter);
    pthread_mutex_unlock(&mail->lock);
    if (heard)
        outcome = (struct ah_outcome){.code = AH_INTERRUPTED, .peer = mail->group->rank};
    return outcome;
}

struct ah_outcome ah_mail_look(struct ah_mail *mail, struct ah_letter *letter)
{
    struct ah_outcome outcome;

    pthread_mutex_lock(&mail->lock);
    if (!is_over(letter))
        ah_mail_pass(mail);
    outcome = outcome_of(mail, letter);
    pthread_mutex_unlock(&mail->lock);
    return outcome;
}

void ah_mail_drop(struct ah_mail *mail, struct ah_letter *letter)
{
    pthread_mutex_lock(&mail->lock);
    forget(mail, letter);
    pthread_mutex_unlock(&mail->lock);
    free(letter);
}

/* The server ---------------------------------------------------------------------------------------------- */

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
        int64_t until = now_ns() + TICK_NS;
        const struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

        pthread_cond_timedwait(&mail->work, &mail->lock, &at);
    }
}

size_t ah_mail_serve(struct ah_mail *mail, uint64_t *keys, size_t most)
{
    uint64_t shifts;
    uint32_t looks = 0, idle = 0;
    size_t number = 0;

    pthread_mutex_lock(&mail->lock);
    shifts = mail->shifts - 1; /* one tick at least, for callers that wait at once */
    while (!mail->stopped) {
        int busy = atomic_load(&mail->drivers) != 0 || shifts != mail->shifts;

        shifts = mail->shifts;
        if (busy || (mail->posted == 0 && !mail->finished.first)) {
            looks = 0;
            /* Also while one thread waits for long: it says when it leaves something behind. */
            mail->cold = idle > WARM_TICKS;
            rest(mail);
            idle = shifts == mail->shifts ? idle + 1 : 0;
            continue;
        }
        if ((number = collect(mail, keys, most)) != 0)
            break;
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

            tend(mail, now_ns());
            told = mail->finished.first != NULL;
            pthread_mutex_unlock(&mail->lock);
            if (!told)
                nap(mail, NULL, NAP_NS);
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
    end_all(mail, AH_ABORTED, mail->group->rank);
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
