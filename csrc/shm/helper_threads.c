#define _GNU_SOURCE
#include "shm/helper_threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "shm/wait.h"

/* Less is not worth waking a thread for, which takes some 50 us. */
#define LEAST_PART ((size_t)256 << 10)

/* How long to wait for hands before looking whether a signal came. */
#define LOOK_NS 50000000L

struct hand {
    struct ah_hands *all;
    struct ah_group view;
    pthread_t thread;
    uint32_t part;
    int started;
    int code;
};

struct ah_hands {
    pthread_mutex_t lock;
    pthread_cond_t asked, over;
    pid_t owner;   /* a forked child has the memory and not the threads */
    uint32_t turn; /* goes up with each job */
    uint32_t left; /* hands that are not done with it */
    int leaving;
    ah_handwork work;
    const void *job;
    uint32_t parts;
    struct hand hands[AH_MOST_HANDS];
};

uint32_t ah_parts(const struct ah_group *group, size_t bytes)
{
    size_t most = bytes / LEAST_PART, hands = group->head->hands;

    return 1 + (uint32_t)(most > hands ? hands : most == 0 ? 0 : most - 1);
}

static void *lend(void *given)
{
    struct hand *self = given;
    struct ah_hands *all = self->all;
    uint32_t turn = 0;

    pthread_mutex_lock(&all->lock);
    while (!all->leaving) {
        if (all->turn == turn || self->part >= all->parts) {
            turn = all->turn;
            pthread_cond_wait(&all->asked, &all->lock);
            continue;
        }
        turn = all->turn;
        pthread_mutex_unlock(&all->lock);
        self->code = all->work(&self->view, all->job, self->part, all->parts);
        pthread_mutex_lock(&all->lock);
        if (--all->left == 0)
            pthread_cond_signal(&all->over);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* The signals of the process are for the threads that it knows of. */
static void start(struct hand *hand)
{
    sigset_t all, before;

    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return;
    hand->started = pthread_create(&hand->thread, NULL, lend, hand) == 0;
    if (hand->started)
        pthread_setname_np(hand->thread, "allhands-hand"); /* as top and the doctor show it; at most 15 letters */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static struct ah_hands *gather(struct ah_group *group)
{
    struct ah_hands *all = calloc(1, sizeof *all);
    pthread_condattr_t clock;

    if (!all)
        return NULL;
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->asked, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&all->over, &clock);
    pthread_condattr_destroy(&clock);
    all->owner = getpid();
    for (uint32_t index = 0; index < group->head->hands; index++) {
        struct hand *hand = &all->hands[index];

        hand->all = all;
        hand->part = index + 1;
        ah_segment_hand(group, index, &hand->view);
        start(hand);
    }
    return all;
}

/* Bring the view of a hand up to date with the call that runs. */
static void brief(const struct ah_group *group, struct ah_group *view)
{
    view->deadline_ns = group->deadline_ns;
    view->spins = group->spins;
    view->yields = group->yields;
    view->culprit = group->culprit;
}

/* Wait until all hands are done: by the deadline, or soon after the group's end, which each of them looks at. A handler that
 * raised ends the group. */
static int await(struct ah_group *group, struct ah_hands *all)
{
    int code = AH_OK;

    pthread_mutex_lock(&all->lock);
    while (all->left > 0) {
        int64_t until = ah_clock_ns() + LOOK_NS;
        struct timespec limit = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

        if (pthread_cond_timedwait(&all->over, &all->lock, &limit) == 0 || !group->pulse || code != AH_OK)
            continue;
        pthread_mutex_unlock(&all->lock);
        if (group->pulse(group->context) != 0) {
            ah_end(group, AH_ABORTED, group->rank);
            group->culprit = group->rank;
            code = AH_INTERRUPTED;
        }
        pthread_mutex_lock(&all->lock);
    }
    all->job = NULL;
    pthread_mutex_unlock(&all->lock);
    return code;
}

int ah_share(struct ah_group *group, ah_handwork work, const void *job, uint32_t parts)
{
    struct ah_hands *all = group->hands;
    int code, waited;

    if (parts == 1)
        return work(group, job, 0, 1);
    if (!all)
        all = group->hands = gather(group);
    if (!all || all->owner != getpid())
        return AH_INVALID;
    pthread_mutex_lock(&all->lock);
    all->work = work;
    all->job = job;
    all->parts = parts;
    all->left = 0;
    for (uint32_t part = 1; part < parts; part++) {
        brief(group, &all->hands[part - 1].view);
        all->left += all->hands[part - 1].started != 0;
    }
    all->turn++;
    pthread_cond_broadcast(&all->asked);
    pthread_mutex_unlock(&all->lock);
    code = work(group, job, 0, parts);
    for (uint32_t part = 1; part < parts; part++) {
        struct hand *hand = &all->hands[part - 1];

        if (!hand->started)
            hand->code = work(&hand->view, job, part, parts);
    }
    waited = await(group, all);
    if (code == AH_OK)
        code = waited;
    for (uint32_t part = 1; part < parts && code == AH_OK; part++) {
        code = all->hands[part - 1].code;
        if (code != AH_OK)
            group->culprit = all->hands[part - 1].view.culprit;
    }
    return code;
}

void ah_dismiss(struct ah_group *group)
{
    struct ah_hands *all = group->hands;

    group->hands = NULL;
    if (!all || all->owner != getpid())
        return;
    pthread_mutex_lock(&all->lock);
    all->leaving = 1;
    pthread_cond_broadcast(&all->asked);
    pthread_mutex_unlock(&all->lock);
    for (uint32_t index = 0; index < AH_MOST_HANDS; index++) {
        if (all->hands[index].started)
            pthread_join(all->hands[index].thread, NULL);
    }
    pthread_cond_destroy(&all->asked);
    pthread_cond_destroy(&all->over);
    pthread_mutex_destroy(&all->lock);
    free(all);
}
