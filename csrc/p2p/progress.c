/* Progress of messages: waiting threads poll all messages of this rank and sleep when nothing moves; a progress thread
 * polls those that were posted and that no thread waits for; deadlines, dead peers and the end of the group complete
 * the others. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "p2p/request.h"
#include "shm/wait.h"

/* Failures ------------------------------------------------------------------------------------------------- */

/* Longest sleep between two checks: bounds the detection of dead peers. */
#define SLEEP_NS 50000000L

/* Interval between polls of pidfds and signals while messages move. */
#define CHECK_NS 10000000L

static int is_complete(struct ah_request *request)
{
    return atomic_load_explicit(&request->complete, memory_order_acquire);
}

/* Whether no peer knows of a request, so that it can be dropped silently. */
static int is_local(const struct ah_request *request)
{
    return request->state == AH_POSTED;
}

/* The outcome of the group, AH_OK while it is alive. */
static int group_status(const struct ah_p2p *p2p, uint32_t *culprit)
{
    uint32_t code = atomic_load_explicit(&p2p->group->head->ended, memory_order_acquire);

    if (code != 0)
        *culprit = code >> 8;
    return (int)(code & 0xff);
}

/* Complete all requests with one outcome. */
static void complete_all(struct ah_p2p *p2p, int code, uint32_t culprit)
{
    while (p2p->last_active)
        ah_request_complete(p2p, p2p->last_active, code, culprit);
}

static void expire_requests(struct ah_p2p *p2p, int64_t now)
{
    for (struct ah_request *request = p2p->last_active, *next; request; request = next) {
        uint32_t peer = request->message.peer == AH_ANY_SOURCE ? p2p->group->rank : request->message.peer;

        next = request->previous_active;
        if (now < request->deadline_ns)
            continue;
        if (!is_local(request)) {
            ah_group_end(p2p->group, AH_TIMEOUT, peer);
            ah_mailbox_wake_all(p2p->group);
        }
        ah_request_complete(p2p, request, AH_TIMEOUT, peer);
    }
}

/* Poll the processes that requests wait for; returns how many have ended. */
static int poll_peers(struct ah_p2p *p2p)
{
    const struct ah_group *group = p2p->group;
    int anyone = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++)
        p2p->pollfds[rank] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (struct ah_request *request = p2p->last_active; request; request = request->previous_active) {
        if (request->message.peer == AH_ANY_SOURCE)
            anyone = 1;
        else
            p2p->pollfds[request->message.peer].fd = group->pidfds[request->message.peer];
    }
    for (uint32_t rank = 0; anyone && rank < group->ranks; rank++)
        p2p->pollfds[rank].fd = group->pidfds[rank];
    return poll(p2p->pollfds, group->ranks, 0);
}

/* A receive from any source fails only when all peers are dead: one may have ended regularly. */
static int all_peers_dead(const struct ah_p2p *p2p)
{
    for (uint32_t rank = 0; rank < p2p->group->ranks; rank++) {
        if (rank != p2p->group->rank && p2p->pollfds[rank].revents == 0)
            return 0;
    }
    return p2p->group->ranks > 1;
}

static void fail_dead_peers(struct ah_p2p *p2p)
{
    int all_dead = all_peers_dead(p2p);

    /* Messages that they sent before they ended still count. */
    while (ah_p2p_poll(p2p) != 0)
        continue;
    for (struct ah_request *request = p2p->last_active, *next; request; request = next) {
        uint32_t peer = request->message.peer;

        next = request->previous_active;
        if (peer == AH_ANY_SOURCE ? !all_dead : p2p->pollfds[peer].revents == 0)
            continue;
        if (peer == AH_ANY_SOURCE)
            peer = p2p->group->rank == 0 ? 1 : 0;
        ah_group_end(p2p->group, AH_DEAD, peer);
        ah_mailbox_wake_all(p2p->group);
        ah_request_complete(p2p, request, AH_DEAD, peer);
    }
}

/* Complete requests that a deadline, a dead peer or the end of the group ends. */
static void check_failures(struct ah_p2p *p2p, int64_t now)
{
    uint32_t culprit;
    int code;

    if (!p2p->last_active)
        return;
    if ((code = group_status(p2p, &culprit)) != 0) {
        while (ah_p2p_poll(p2p) != 0)
            continue;
        complete_all(p2p, code, culprit);
        return;
    }
    expire_requests(p2p, now);
    if (now - p2p->checked_ns < CHECK_NS)
        return;
    p2p->checked_ns = now;
    if (poll_peers(p2p) > 0)
        fail_dead_peers(p2p);
}

/* Waiting -------------------------------------------------------------------------------------------------- */

/* A poll counts as this many spins of a collective. Where both ranks share a core, polling delays the peer: 4 us in
 * all, against 0.3 us for a small message between two cores. */
#define POLL_SPINS 16

/* Polls for a small message before the GIL is released: a few microseconds, enough for a reply that is on its way. */
#define SHORT_POLLS 60

/* sched_yield takes longer than this only if another thread ran. */
#define YIELD_NS 1000

/* Yield the core, and note whether another thread ran: where ranks outnumber cores, most may sleep. */
static void yield_core(struct ah_p2p *p2p)
{
    int64_t before = ah_clock_ns();

    sched_yield();
    atomic_store_explicit(&p2p->core_is_free, ah_clock_ns() - before < YIELD_NS, memory_order_relaxed);
}

/* Spins before yielding. */
static uint32_t spin_limit(const struct ah_p2p *p2p)
{
    if (p2p->group->spins != 0)
        return p2p->group->spins / POLL_SPINS;
    return atomic_load_explicit(&p2p->core_is_free, memory_order_relaxed) ? SHORT_POLLS : 0;
}

/* Sleep until a peer wakes us. Returns nonzero if a signal arrived. */
static int sleep_until_woken(struct ah_p2p *p2p, struct ah_request *request, int64_t limit_ns)
{
    struct ah_mailbox *mailbox = p2p->mailbox;
    uint32_t wake_count;
    size_t moved;
    int signalled = 0;

    atomic_fetch_add(&mailbox->sleeping, 1);
    wake_count = atomic_load(&mailbox->wake_count);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&p2p->lock);
    moved = ah_p2p_poll(p2p);
    if (p2p->stopped)
        moved++;
    pthread_mutex_unlock(&p2p->lock);
    if (moved == 0 && !(request && is_complete(request)))
        signalled = ah_mailbox_sleep(mailbox, wake_count, limit_ns);
    atomic_fetch_sub(&mailbox->sleeping, 1);
    return signalled;
}

/* Poll until `request` is complete or `until_ns` has passed; nonzero if the interrupt check ended the wait. */
static int wait_for(struct ah_p2p *p2p, struct ah_request *request, int64_t until_ns,
                    const struct ah_interrupt *interrupt)
{
    const uint32_t spins = spin_limit(p2p), spins_and_yields = spins + p2p->group->yields;
    uint32_t polls = 0, moves = 0;
    int64_t now, checked_interrupt_ns = 0;

    while (!is_complete(request)) {
        size_t moved = 0;
        int signalled = 0;

        if (pthread_mutex_trylock(&p2p->lock) == 0) {
            moved = ah_p2p_poll(p2p);
            pthread_mutex_unlock(&p2p->lock);
        }
        if (moved != 0) {
            polls = 0;
            if (++moves % 64 != 0)
                continue;
        } else if (polls < spins_and_yields) {
            if (polls++ < spins)
                ah_relax();
            else
                yield_core(p2p);
            continue;
        }
        now = ah_clock_ns();
        pthread_mutex_lock(&p2p->lock);
        check_failures(p2p, now);
        pthread_mutex_unlock(&p2p->lock);
        if (is_complete(request) || now >= until_ns)
            break;
        if (moved == 0) {
            int64_t limit = until_ns - now < SLEEP_NS ? until_ns - now : SLEEP_NS;

            if (request->deadline_ns - now < limit)
                limit = request->deadline_ns > now ? request->deadline_ns - now : 1;
            signalled = sleep_until_woken(p2p, request, limit);
        }
        if (checked_interrupt_ns == 0)
            checked_interrupt_ns = now;
        if (interrupt && !is_complete(request) && (signalled || now - checked_interrupt_ns >= SLEEP_NS)) {
            checked_interrupt_ns = now;
            if (interrupt->check_interrupt(interrupt->context) != 0)
                return 1;
        }
    }
    return 0;
}

static void begin_wait(struct ah_p2p *p2p)
{
    atomic_fetch_add(&p2p->waiting_threads, 1);
    p2p->wait_count++;
}

/* Called with the lock held. The progress thread continues what is left. */
static void end_wait(struct ah_p2p *p2p)
{
    atomic_fetch_sub(&p2p->waiting_threads, 1);
    if (p2p->posted != 0)
        ah_p2p_wake_progress_thread(p2p);
}

/* Called with the lock held. Whether nothing can be sent or received, with the outcome. */
static int refused(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome)
{
    outcome->code = group_status(p2p, &outcome->peer);
    if (outcome->code == AH_OK && p2p->stopped)
        *outcome = (struct ah_outcome){.code = AH_ABORTED, .peer = p2p->group->rank};
    if (outcome->code == AH_OK && message->peer >= p2p->group->ranks &&
        (message->sends || message->peer != AH_ANY_SOURCE))
        *outcome = (struct ah_outcome){.code = AH_INVALID, .peer = p2p->group->rank};
    return outcome->code != AH_OK;
}

static void init_request(struct ah_request *request, const struct ah_message *message, int64_t timeout_ns)
{
    memset(request, 0, sizeof *request);
    request->message = *message;
    request->timeout_ns = timeout_ns;
    request->deadline_ns = INT64_MAX;
}

/* Start the timeout if it has not started. */
static void start_timeout(struct ah_request *request)
{
    if (request->timeout_ns >= 0 && request->deadline_ns == INT64_MAX)
        request->deadline_ns = ah_clock_ns() + request->timeout_ns;
}

/* Remove a request whose memory is about to be freed. */
static void cancel(struct ah_p2p *p2p, struct ah_request *request)
{
    if (!is_complete(request)) {
        if (!is_local(request)) {
            ah_group_end(p2p->group, AH_ABORTED, p2p->group->rank);
            ah_mailbox_wake_all(p2p->group);
        }
        if (request->posted) {
            p2p->posted--;
            p2p->posted_sends -= (size_t)request->message.sends;
        }
    }
    ah_request_remove(p2p, request);
}

struct ah_outcome ah_p2p_run(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                             const struct ah_interrupt *interrupt)
{
    struct ah_outcome outcome;
    struct ah_request request;

    init_request(&request, message, timeout_ns);
    pthread_mutex_lock(&p2p->lock);
    if (refused(p2p, message, &outcome)) {
        pthread_mutex_unlock(&p2p->lock);
        return outcome;
    }
    ah_request_start(p2p, &request);
    if (!is_complete(&request)) {
        int interrupted;

        begin_wait(p2p);
        start_timeout(&request);
        pthread_mutex_unlock(&p2p->lock);
        interrupted = wait_for(p2p, &request, INT64_MAX, interrupt);
        pthread_mutex_lock(&p2p->lock);
        end_wait(p2p);
        if (interrupted)
            request.outcome = (struct ah_outcome){.code = AH_INTERRUPTED, .peer = p2p->group->rank};
        cancel(p2p, &request);
    }
    pthread_mutex_unlock(&p2p->lock);
    return request.outcome;
}

/* Called with the lock held. Send an eager message if the ring has room. */
static int try_send(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome)
{
    struct ah_envelope_header header = {.tag = message->tag,
                                        .bytes = message->bytes,
                                        .source = p2p->group->rank,
                                        .dtype = message->dtype,
                                        .kind = AH_EAGER};

    if (p2p->unsent[message->peer].first || !ah_mailbox_put(p2p->group, message->peer, &header, message->data))
        return 0;
    *outcome = (struct ah_outcome){.code = AH_OK, .peer = message->peer};
    return 1;
}

/* Called with the lock held. Receive an eager message that has arrived or arrives at once. */
static int try_receive(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome)
{
    uint32_t polls = spin_limit(p2p) != 0 ? SHORT_POLLS : 1;
    struct ah_request request;

    init_request(&request, message, -1);
    ah_request_start(p2p, &request);
    while (!is_complete(&request) && polls-- != 0) {
        if (ah_p2p_poll(p2p) == 0)
            ah_relax();
    }
    *outcome = request.outcome;
    if (is_complete(&request))
        return 1;
    /* It was never visible to a peer. */
    ah_request_remove(p2p, &request);
    return 0;
}

int ah_p2p_try(struct ah_p2p *p2p, const struct ah_message *message, struct ah_outcome *outcome)
{
    int done;

    if (message->bytes > AH_EAGER_BYTES || message->peer >= p2p->group->ranks || pthread_mutex_trylock(&p2p->lock) != 0)
        return 0;
    done = refused(p2p, message, outcome) ||
           (message->sends ? try_send(p2p, message, outcome) : try_receive(p2p, message, outcome));
    pthread_mutex_unlock(&p2p->lock);
    return done;
}

struct ah_outcome ah_p2p_post(struct ah_p2p *p2p, const struct ah_message *message, int64_t timeout_ns,
                               uint64_t key, struct ah_request **posted)
{
    struct ah_outcome outcome;
    struct ah_request *request;

    *posted = NULL;
    request = malloc(sizeof *request);
    if (!request)
        return (struct ah_outcome){.code = AH_INVALID, .peer = p2p->group->rank};
    init_request(request, message, timeout_ns);
    request->key = key;
    pthread_mutex_lock(&p2p->lock);
    if (refused(p2p, message, &outcome)) {
        pthread_mutex_unlock(&p2p->lock);
        free(request);
        return outcome;
    }
    ah_request_start(p2p, request);
    if (!is_complete(request) && !message->sends)
        ah_p2p_poll(p2p);
    outcome = request->outcome;
    if (!is_complete(request)) {
        outcome.code = AH_PENDING;
        request->posted = 1;
        p2p->posted++;
        p2p->posted_sends += (size_t)message->sends;
        p2p->wait_count++;
        ah_p2p_wake_progress_thread(p2p);
        *posted = request;
    }
    pthread_mutex_unlock(&p2p->lock);
    if (!*posted)
        free(request);
    return outcome;
}

/* Called with the lock held. The caller has the outcome, so the progress thread does not report it. */
static struct ah_outcome outcome_of(struct ah_p2p *p2p, struct ah_request *request)
{
    if (!is_complete(request))
        return (struct ah_outcome){.code = AH_PENDING};
    ah_request_remove(p2p, request);
    return request->outcome;
}

struct ah_outcome ah_p2p_wait(struct ah_p2p *p2p, struct ah_request *request, int64_t limit_ns,
                               const struct ah_interrupt *interrupt)
{
    struct ah_outcome outcome;
    int interrupted = 0;

    pthread_mutex_lock(&p2p->lock);
    if (!is_complete(request)) {
        begin_wait(p2p);
        request->waiters++;
        /* The caller's own limit does not end the group. */
        if (limit_ns < 0)
            start_timeout(request);
        pthread_mutex_unlock(&p2p->lock);
        interrupted = wait_for(p2p, request, limit_ns < 0 ? INT64_MAX : ah_clock_ns() + limit_ns, interrupt);
        pthread_mutex_lock(&p2p->lock);
        request->waiters--;
        end_wait(p2p);
    } else {
        p2p->wait_count++;
    }
    if (interrupted) {
        outcome = (struct ah_outcome){.code = AH_INTERRUPTED, .peer = p2p->group->rank};
        if (is_complete(request) && request->waiters == 0 && !request->list)
            ah_request_report(p2p, request);
    } else {
        outcome = outcome_of(p2p, request);
    }
    pthread_mutex_unlock(&p2p->lock);
    return outcome;
}

struct ah_outcome ah_p2p_test(struct ah_p2p *p2p, struct ah_request *request)
{
    struct ah_outcome outcome;

    pthread_mutex_lock(&p2p->lock);
    if (!is_complete(request))
        ah_p2p_poll(p2p);
    outcome = outcome_of(p2p, request);
    pthread_mutex_unlock(&p2p->lock);
    return outcome;
}

void ah_p2p_start_timeout(struct ah_p2p *p2p, struct ah_request *request)
{
    pthread_mutex_lock(&p2p->lock);
    start_timeout(request);
    pthread_mutex_unlock(&p2p->lock);
}

void ah_p2p_free_request(struct ah_p2p *p2p, struct ah_request *request)
{
    pthread_mutex_lock(&p2p->lock);
    cancel(p2p, request);
    pthread_mutex_unlock(&p2p->lock);
    free(request);
}

/* The progress thread -------------------------------------------------------------------------------------- */

/* The progress thread waits this long while other threads poll, so that a caller that posts several requests and then
 * waits for them is not disturbed, and need not wake it for each. */
#define TICK_NS 200000L

/* Ticks after which completions are reported although a thread waits for another request. */
#define LATE_TICKS 5

/* Idle ticks after which the progress thread sleeps until it is woken. */
#define WARM_TICKS 50

void ah_p2p_wake_progress_thread(struct ah_p2p *p2p)
{
    if (p2p->progress_sleeps) {
        p2p->progress_sleeps = 0;
        pthread_cond_signal(&p2p->work);
    }
}

static size_t collect_keys(struct ah_p2p *p2p, uint64_t *keys, size_t most)
{
    size_t number = 0;

    for (struct ah_request *request; number < most && (request = p2p->finished.first) != NULL; number++) {
        keys[number] = request->key;
        ah_request_remove(p2p, request);
    }
    return number;
}

/* Wait until woken, or for a tick if there was work lately. */
static void wait_for_work(struct ah_p2p *p2p)
{
    if (p2p->progress_sleeps) {
        pthread_cond_wait(&p2p->work, &p2p->lock);
    } else {
        int64_t until = ah_clock_ns() + TICK_NS;
        const struct timespec at = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

        pthread_cond_timedwait(&p2p->work, &p2p->lock, &at);
    }
}

size_t ah_p2p_progress(struct ah_p2p *p2p, uint64_t *keys, size_t most)
{
    uint64_t wait_count;
    uint32_t polls = 0, idle = 0, late = 0;
    size_t number = 0;

    pthread_mutex_lock(&p2p->lock);
    wait_count = p2p->wait_count - 1; /* at least one tick, for callers that wait at once */
    while (!p2p->stopped) {
        int busy = atomic_load(&p2p->waiting_threads) != 0 || wait_count != p2p->wait_count;

        wait_count = p2p->wait_count;
        if (p2p->finished.first && (!busy || late++ >= LATE_TICKS)) {
            number = collect_keys(p2p, keys, most);
            break;
        }
        if (busy || (p2p->posted == 0 && !p2p->finished.first)) {
            polls = 0;
            /* Also during another thread's long wait: end_wait wakes this one. */
            p2p->progress_sleeps = idle > WARM_TICKS && !p2p->finished.first;
            wait_for_work(p2p);
            idle = wait_count == p2p->wait_count ? idle + 1 : 0;
            continue;
        }
        idle = 0;
        if (ah_p2p_poll(p2p) != 0)
            polls = 0;
        else
            polls++;
        if (polls <= p2p->group->yields) {
            pthread_mutex_unlock(&p2p->lock);
            if (polls != 0)
                sched_yield();
        } else {
            int finished;

            check_failures(p2p, ah_clock_ns());
            finished = p2p->finished.first != NULL;
            pthread_mutex_unlock(&p2p->lock);
            if (!finished)
                sleep_until_woken(p2p, NULL, SLEEP_NS);
        }
        pthread_mutex_lock(&p2p->lock);
    }
    p2p->progress_sleeps = 0;
    pthread_mutex_unlock(&p2p->lock);
    return number;
}

void ah_p2p_stop(struct ah_p2p *p2p)
{
    pthread_mutex_lock(&p2p->lock);
    p2p->stopped = 1;
    complete_all(p2p, AH_ABORTED, p2p->group->rank);
    pthread_cond_signal(&p2p->work);
    pthread_mutex_unlock(&p2p->lock);
    ah_mailbox_wake(p2p->group, p2p->group->rank);
}

size_t ah_p2p_pending_sends(struct ah_p2p *p2p)
{
    size_t number;

    pthread_mutex_lock(&p2p->lock);
    number = p2p->posted_sends;
    pthread_mutex_unlock(&p2p->lock);
    return number;
}
