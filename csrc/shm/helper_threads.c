#define _GNU_SOURCE
#include "shm/helper_threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "shm/wait.h"

/* Smallest part of a thread: waking one takes some 50 us. */
#define LEAST_PART ((size_t)256 << 10)

/* Longest wait for helpers between two checks for signals. */
#define CHECK_NS 50000000L

struct helper {
    struct ah_helper_threads *all;
    struct ah_group view;
    pthread_t thread;
    uint32_t part;
    int started;
    int code;
};

struct ah_helper_threads {
    pthread_mutex_t lock;
    pthread_cond_t job_ready, job_done;
    pid_t owner;         /* a forked child has the memory and not the threads */
    uint32_t job_number; /* incremented with each job */
    uint32_t running;    /* helpers that have not finished it */
    int stopping;
    ah_part_work work;
    const void *job;
    uint32_t parts;
    struct helper helpers[AH_MAX_HELPER_THREADS];
};

uint32_t ah_part_count(const struct ah_group *group, size_t bytes)
{
    size_t most = bytes / LEAST_PART, helpers = group->head->helper_threads;

    return 1 + (uint32_t)(most > helpers ? helpers : most == 0 ? 0 : most - 1);
}

static void *helper_main(void *given)
{
    struct helper *self = given;
    struct ah_helper_threads *all = self->all;
    uint32_t job_number = 0;

    pthread_mutex_lock(&all->lock);
    while (!all->stopping) {
        if (all->job_number == job_number || self->part >= all->parts) {
            job_number = all->job_number;
            pthread_cond_wait(&all->job_ready, &all->lock);
            continue;
        }
        job_number = all->job_number;
        pthread_mutex_unlock(&all->lock);
        self->code = all->work(&self->view, all->job, self->part, all->parts);
        pthread_mutex_lock(&all->lock);
        if (--all->running == 0)
            pthread_cond_signal(&all->job_done);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* Signals of the process are left to its other threads. */
static void start(struct helper *helper)
{
    sigset_t all, before;

    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return;
    helper->started = pthread_create(&helper->thread, NULL, helper_main, helper) == 0;
    if (helper->started)
        pthread_setname_np(helper->thread, "allhands-helper"); /* shown by top; at most 15 characters */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static struct ah_helper_threads *start_all(struct ah_group *group)
{
    struct ah_helper_threads *all = calloc(1, sizeof *all);
    pthread_condattr_t clock;

    if (!all)
        return NULL;
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->job_ready, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&all->job_done, &clock);
    pthread_condattr_destroy(&clock);
    all->owner = getpid();
    for (uint32_t index = 0; index < group->head->helper_threads; index++) {
        struct helper *helper = &all->helpers[index];

        helper->all = all;
        helper->part = index + 1;
        ah_segment_helper_view(group, index, &helper->view);
        start(helper);
    }
    return all;
}

/* Copy what the running call needs into the view of a helper. */
static void update_view(const struct ah_group *group, struct ah_group *view)
{
    view->deadline_ns = group->deadline_ns;
    view->spins = group->spins;
    view->yields = group->yields;
    view->culprit = group->culprit;
}

/* Wait until all helpers have finished; each of them checks the deadline and the group's end. A signal handler that
 * raised ends the group. */
static int await_helpers(struct ah_group *group, struct ah_helper_threads *all)
{
    int code = AH_OK;

    pthread_mutex_lock(&all->lock);
    while (all->running > 0) {
        int64_t until = ah_clock_ns() + CHECK_NS;
        struct timespec limit = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

        if (pthread_cond_timedwait(&all->job_done, &all->lock, &limit) == 0 || !group->check_interrupt || code != AH_OK)
            continue;
        pthread_mutex_unlock(&all->lock);
        if (group->check_interrupt(group->context) != 0) {
            ah_group_end(group, AH_ABORTED, group->rank);
            group->culprit = group->rank;
            code = AH_INTERRUPTED;
        }
        pthread_mutex_lock(&all->lock);
    }
    all->job = NULL;
    pthread_mutex_unlock(&all->lock);
    return code;
}

int ah_run_parts(struct ah_group *group, ah_part_work work, const void *job, uint32_t parts)
{
    struct ah_helper_threads *all = group->helper_threads;
    int code, waited;

    if (parts == 1)
        return work(group, job, 0, 1);
    if (!all)
        all = group->helper_threads = start_all(group);
    if (!all || all->owner != getpid())
        return AH_INVALID;
    pthread_mutex_lock(&all->lock);
    all->work = work;
    all->job = job;
    all->parts = parts;
    all->running = 0;
    for (uint32_t part = 1; part < parts; part++) {
        update_view(group, &all->helpers[part - 1].view);
        all->running += all->helpers[part - 1].started != 0;
    }
    all->job_number++;
    pthread_cond_broadcast(&all->job_ready);
    pthread_mutex_unlock(&all->lock);
    code = work(group, job, 0, parts);
    for (uint32_t part = 1; part < parts; part++) {
        struct helper *helper = &all->helpers[part - 1];

        if (!helper->started)
            helper->code = work(&helper->view, job, part, parts);
    }
    waited = await_helpers(group, all);
    if (code == AH_OK)
        code = waited;
    for (uint32_t part = 1; part < parts && code == AH_OK; part++) {
        code = all->helpers[part - 1].code;
        if (code != AH_OK)
            group->culprit = all->helpers[part - 1].view.culprit;
    }
    return code;
}

void ah_helper_threads_stop(struct ah_group *group)
{
    struct ah_helper_threads *all = group->helper_threads;

    group->helper_threads = NULL;
    if (!all || all->owner != getpid())
        return;
    pthread_mutex_lock(&all->lock);
    all->stopping = 1;
    pthread_cond_broadcast(&all->job_ready);
    pthread_mutex_unlock(&all->lock);
    for (uint32_t index = 0; index < AH_MAX_HELPER_THREADS; index++) {
        if (all->helpers[index].started)
            pthread_join(all->helpers[index].thread, NULL);
    }
    pthread_cond_destroy(&all->job_ready);
    pthread_cond_destroy(&all->job_done);
    pthread_mutex_destroy(&all->lock);
    free(all);
}
