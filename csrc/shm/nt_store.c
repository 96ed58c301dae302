#include "shm/nt_store.h"

#include "shm/copy.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* Smallest timed write: takes longer than reading the timer, and is as large as a contiguous piece of a block of
 * results. */
#define TIMED_BYTES ((size_t)8 << 10)

/* Writes up to this size always go through the caches: they arrive before the reader looks. */
#define SMALL_BYTES ((size_t)4 << 10)

/* One write in so many probes the other method: the worse one takes up to ten times as long. A prime, so that equal
 * calls do not always probe with the same chunk. If the current method seems the worse one, probes are more frequent.
 * */
#define PROBE_EVERY 61
#define PROBE_SOON 5

/* Number of writes in the moving averages: many for the current method, because the first writes of a call are faster
 * than its others; few for the other one, because it is measured seldom. */
#define MEAN_CHOSEN 16
#define MEAN_PROBED 2

/* A longer time includes an interruption: without a shared cache a write takes a third of this. */
#define MAX_TICKS ((uint64_t)1 << 15)

/* Consecutive probes that must favour the other method, so that a disturbance of the system does not decide. */
#define STREAK_LENGTH 2

/* What a reader loses if it fetches the data from memory instead of a cache that both cores share. A difference, not a
 * ratio: the time of the write itself depends on whether its source is in memory or in L1. */
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

    /* Not the very first write, which may fault pages in. */
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
