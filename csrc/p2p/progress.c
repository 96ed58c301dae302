/* Waiting for messages: whoever waits moves all of this rank's messages on, and sleeps when nothing moves. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "p2p/request.h"
#include "shm/wait.h"

/* A pass stands for this many looks at a counter of a collective: it costs a few of them, and where the other rank
 * shares our core after all, every look of ours is time that it does not have (4 us in all, against the 0.3 us that a
 * small message takes between two cores). */
#define PASS_LOOKS 16

/* How often to look for a small message before letting go of what the caller holds: some microseconds, within which an
 * answer that is on its way comes. */
#define SHORT_LOOKS 60

/* Giving the core away takes so long only where someone takes it. */
#define TAKEN_NS 1000

/* Give the core to whoever wants it, and note whether someone did: where ranks outnumber the cores, most of them may sleep. */
static void give_way(struct ah_mail *mail)
{
    int64_t before = ah_now_ns();

    sched_yield();
    atomic_store_explicit(&mail->alone, ah_now_ns() - before < TAKEN_NS, memory_order_relaxed);
}

/* How often to look before giving the core away. */
static uint32_t looks_of(const struct ah_mail *mail)
{
    if (mail->group->spins != 0)
        return mail->group->spins / PASS_LOOKS;
    return atomic_load_explicit(&mail->alone, memory_order_relaxed) ? SHORT_LOOKS : 0;
}

/* Sleep until something may have changed. Returns not 0 where a signal came. */
int ah_mail_nap(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns)
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
    if (moved == 0 && !(letter && ah_is_over(letter)))
        signalled = ah_sleep(box, bell, limit_ns);
    atomic_fetch_sub(&box->sleeping, 1);
    return signalled;
}

/* Move things on until `letter` is over, or `until_ns` is past; not 0 where the ear heard something. */
static int drive(struct ah_mail *mail, struct ah_letter *letter, int64_t until_ns, const struct ah_ear *ear)
{
    const uint32_t spins = looks_of(mail), patience = spins + mail->group->yields;
    uint32_t looks = 0, moves = 0;
    int64_t now, heard_ns = 0;

    while (!ah_is_over(letter)) {
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
                ah_relax();
            else
                give_way(mail);
            continue;
        }
        now = ah_now_ns();
        pthread_mutex_lock(&mail->lock);
        ah_mail_tend(mail, now);
        pthread_mutex_unlock(&mail->lock);
        if (ah_is_over(letter) || now >= until_ns)
            break;
        if (moved == 0) {
            int64_t limit = until_ns - now < AH_NAP_NS ? until_ns - now : AH_NAP_NS;

            if (letter->deadline_ns - now < limit)
                limit = letter->deadline_ns > now ? letter->deadline_ns - now : 1;
            signalled = ah_mail_nap(mail, letter, limit);
        }
        if (heard_ns == 0)
            heard_ns = now;
        if (ear && !ah_is_over(letter) && (signalled || now - heard_ns >= AH_NAP_NS)) {
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
    if (mail->posted != 0)
        ah_mail_call_server(mail);
}

/* With the lock held: why nothing can be sent or received at all. */
static int refused(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    outcome->code = ah_group_ended(mail, &outcome->peer);
    if (outcome->code == AH_OK && mail->stopped)
        *outcome = (struct ah_outcome){.code = AH_ABORTED, .peer = mail->group->rank};
    if (outcome->code == AH_OK && message->peer >= mail->group->ranks && (message->sends || message->peer != AH_ANYONE))
        *outcome = (struct ah_outcome){.code = AH_INVALID, .peer = mail->group->rank};
    return outcome->code != AH_OK;
}

static void prepare(struct ah_letter *letter, const struct ah_message *message, int64_t timeout_ns)
{
    memset(letter, 0, sizeof *letter);
    letter->message = *message;
    letter->timeout_ns = timeout_ns;
    letter->deadline_ns = INT64_MAX;
}

/* Its time begins to run. */
static void start_clock(struct ah_letter *letter)
{
    if (letter->timeout_ns >= 0 && letter->deadline_ns == INT64_MAX)
        letter->deadline_ns = ah_now_ns() + letter->timeout_ns;
}

/* Forget a letter whose memory goes. */
static void forget(struct ah_mail *mail, struct ah_letter *letter)
{
    if (!ah_is_over(letter)) {
        if (!ah_is_private(letter)) {
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
    if (!ah_is_over(&letter)) {
        int heard;

        begin_shift(mail);
        start_clock(&letter);
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

/* With the lock held: put a small message into the target's box if there is room now. */
static int try_send(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    struct ah_cover cover = {.tag = message->tag,
                             .bytes = message->bytes,
                             .source = mail->group->rank,
                             .dtype = message->dtype,
                             .kind = AH_WHOLE};

    if (mail->unsent[message->peer].first || !ah_inbox_put(mail->group, message->peer, &cover, message->data))
        return 0;
    *outcome = (struct ah_outcome){.code = AH_OK, .peer = message->peer};
    return 1;
}

/* With the lock held: take a small message that is there, or comes at once. */
static int try_receive(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    uint32_t looks = looks_of(mail) != 0 ? SHORT_LOOKS : 1;
    struct ah_letter letter;

    prepare(&letter, message, -1);
    ah_letter_add(mail, &letter);
    while (!ah_is_over(&letter) && looks-- != 0) {
        if (ah_mail_pass(mail) == 0)
            ah_relax();
    }
    *outcome = letter.outcome;
    if (ah_is_over(&letter))
        return 1;
    /* Nobody else knows of it. */
    ah_letter_remove(mail, &letter);
    return 0;
}

int ah_mail_try(struct ah_mail *mail, const struct ah_message *message, struct ah_outcome *outcome)
{
    int done;

    if (message->bytes > AH_EAGER_BYTES || message->peer >= mail->group->ranks || pthread_mutex_trylock(&mail->lock) != 0)
        return 0;
    done = refused(mail, message, outcome) ||
           (message->sends ? try_send(mail, message, outcome) : try_receive(mail, message, outcome));
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
        return (struct ah_outcome){.code = AH_INVALID, .peer = mail->group->rank};
    prepare(letter, message, timeout_ns);
    letter->key = key;
    pthread_mutex_lock(&mail->lock);
    if (refused(mail, message, &outcome)) {
        pthread_mutex_unlock(&mail->lock);
        free(letter);
        return outcome;
    }
    ah_letter_add(mail, letter);
    if (!ah_is_over(letter) && !message->sends)
        ah_mail_pass(mail);
    outcome = letter->outcome;
    if (!ah_is_over(letter)) {
        outcome.code = AH_UNDER_WAY;
        letter->posted = 1;
        mail->posted++;
        mail->posted_sends += (size_t)message->sends;
        mail->shifts++;
        ah_mail_call_server(mail);
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
    if (!ah_is_over(letter))
        return (struct ah_outcome){.code = AH_UNDER_WAY};
    ah_letter_remove(mail, letter);
    return letter->outcome;
}

struct ah_outcome ah_mail_wait(struct ah_mail *mail, struct ah_letter *letter, int64_t limit_ns,
                               const struct ah_ear *ear)
{
    struct ah_outcome outcome;
    int heard = 0;

    pthread_mutex_lock(&mail->lock);
    if (!ah_is_over(letter)) {
        begin_shift(mail);
        letter->awaited++;
        /* A limit of the caller's own is not the group's. */
        if (limit_ns < 0)
            start_clock(letter);
        pthread_mutex_unlock(&mail->lock);
        heard = drive(mail, letter, limit_ns < 0 ? INT64_MAX : ah_now_ns() + limit_ns, ear);
        pthread_mutex_lock(&mail->lock);
        letter->awaited--;
        end_shift(mail);
    } else {
        mail->shifts++;
    }
    if (heard) {
        outcome = (struct ah_outcome){.code = AH_INTERRUPTED, .peer = mail->group->rank};
        if (ah_is_over(letter) && letter->awaited == 0 && !letter->list)
            ah_letter_tell(mail, letter);
    } else {
        outcome = outcome_of(mail, letter);
    }
    pthread_mutex_unlock(&mail->lock);
    return outcome;
}

struct ah_outcome ah_mail_look(struct ah_mail *mail, struct ah_letter *letter)
{
    struct ah_outcome outcome;

    pthread_mutex_lock(&mail->lock);
    if (!ah_is_over(letter))
        ah_mail_pass(mail);
    outcome = outcome_of(mail, letter);
    pthread_mutex_unlock(&mail->lock);
    return outcome;
}

void ah_mail_due(struct ah_mail *mail, struct ah_letter *letter)
{
    pthread_mutex_lock(&mail->lock);
    start_clock(letter);
    pthread_mutex_unlock(&mail->lock);
}

void ah_mail_drop(struct ah_mail *mail, struct ah_letter *letter)
{
    pthread_mutex_lock(&mail->lock);
    forget(mail, letter);
    pthread_mutex_unlock(&mail->lock);
    free(letter);
}
