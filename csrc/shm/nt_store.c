#include "shm/nt_store.h"

#include "shm/copy.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* What is timed: more than a timer's own time, and as much as a block of results has in one piece. */
#define TIMED_BYTES ((size_t)8 << 10)

/* Less than this goes by way of the caches: it is there before the reader looks. */
#define SMALL_BYTES ((size_t)4 << 10)

/* One in so many goes the other way: the worse takes up to ten times as long. A prime, so that calls that all write as often do not
 * send the same of their chunks there each time. Where the facts that is consumed seems to be the worse, it is seen to at once. */
#define PROBE_EVERY 61
#define PROBE_SOON 5

/* A mean of the last ones, about so many: of the facts that is consumed many, because the first writes of a call are faster than its others;
 * of the other one few, because it is consumed seldom. */
#define MEAN_CHOSEN 16
#define MEAN_PROBED 2

/* More than this was no write but an interruption. Where no cache is shared it takes a third. */
#define MAX_TICKS ((uint64_t)1 << 15)

/* How many times running the other way has to be better: what the system did meanwhile must not decide. */
#define STREAK_LENGTH 2

/* Whoever reads what went bypass the caches fetches it from memory, which takes about this much longer than from a cache that both cores
 * share. A difference and no ratio: what is written comes from memory itself, or from the first-level cache. */
#define FETCH_TICKS 1500

static int is_bypass_better(const struct ah_nt_store *store)
{
    return store->ticks[0] > store->ticks[1] + FETCH_TICKS;
}

void ah_nt_store_decide(struct ah_nt_store *store)
{
    int bypass = is_bypass_better(store);

    store->streak = bypass != store->bypass ? store->streak + 1 : 0;
    if (store->streak == STREAK_LENGTH) {
        store->bypass = bypass;
        store->streak = 0;
    }
}

int ah_nt_store_choose(struct ah_nt_store *store)
{
    uint32_t every = is_bypass_better(store) != store->bypass ? PROBE_SOON : PROBE_EVERY;

    /* Not the very first, which finds pages that nobody has touched yet. */
    return ++store->writes % every == 0 ? !store->bypass : store->bypass;
}

void ah_nt_store_record(struct ah_nt_store *store, int bypass, uint64_t ticks)
{
    uint64_t share = bypass == store->bypass ? MEAN_CHOSEN : MEAN_PROBED, *mean = &store->ticks[bypass != 0];

    ticks = ticks < MAX_TICKS ? ticks : MAX_TICKS;
    *mean = *mean == 0 ? ticks : (*mean * (share - 1) + ticks) / share;
}

#if defined(__x86_64__)
void ah_nt_store_copy(struct ah_nt_store *store, unsigned char *to, const unsigned char *from, size_t bytes)
{
    uint64_t begun;
    int bypass;

    if (bytes < TIMED_BYTES) {
        ah_copy(to, from, bytes, store->bypass && bytes > SMALL_BYTES);
        return;
    }
    bypass = ah_nt_store_choose(store);
    begun = __rdtsc();
    ah_copy(to, from, bytes, bypass);
    ah_nt_store_record(store, bypass, (__rdtsc() - begun) * TIMED_BYTES / bytes);
    if (bypass != store->bypass)
        ah_nt_store_decide(store);
}
#else
void ah_nt_store_copy(struct ah_nt_store *store, unsigned char *to, const unsigned char *from, size_t bytes)
{
    (void)store;
    ah_copy(to, from, bytes, 0);
}
#endif
