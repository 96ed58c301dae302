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
 * send the same of their chunks there each time. Where the way that is taken seems to be the worse, it is seen to at once. */
#define OTHER_EVERY 61
#define OTHER_SOON 5

/* A mean of the last ones, about so many: of the way that is taken many, because the first writes of a call are faster than its others;
 * of the other one few, because it is taken seldom. */
#define MEAN_TAKEN 16
#define MEAN_OTHER 2

/* More than this was no write but an interruption. Where no cache is shared it takes a third. */
#define MOST_TICKS ((uint64_t)1 << 15)

/* How many times running the other way has to be better: what the system did meanwhile must not decide. */
#define TIMED_ALIKE 2

/* Whoever reads what went past the caches fetches it from memory, which takes about this much longer than from a cache that both cores
 * share. A difference and no ratio: what is written comes from memory itself, or from the first-level cache. */
#define FETCH_TICKS 1500

static int is_past_better(const struct ah_store *store)
{
    return store->ticks[0] > store->ticks[1] + FETCH_TICKS;
}

void ah_judge(struct ah_store *store)
{
    int past = is_past_better(store);

    store->alike = past != store->past ? store->alike + 1 : 0;
    if (store->alike == TIMED_ALIKE) {
        store->past = past;
        store->alike = 0;
    }
}

int ah_turn(struct ah_store *store)
{
    uint32_t every = is_past_better(store) != store->past ? OTHER_SOON : OTHER_EVERY;

    /* Not the very first, which finds pages that nobody has touched yet. */
    return ++store->turn % every == 0 ? !store->past : store->past;
}

void ah_note(struct ah_store *store, int past, uint64_t ticks)
{
    uint64_t share = past == store->past ? MEAN_TAKEN : MEAN_OTHER, *mean = &store->ticks[past != 0];

    ticks = ticks < MOST_TICKS ? ticks : MOST_TICKS;
    *mean = *mean == 0 ? ticks : (*mean * (share - 1) + ticks) / share;
}

#if defined(__x86_64__)
void ah_fill(struct ah_store *store, unsigned char *to, const unsigned char *from, size_t bytes)
{
    uint64_t begun;
    int past;

    if (bytes < TIMED_BYTES) {
        ah_copy(to, from, bytes, store->past && bytes > SMALL_BYTES);
        return;
    }
    past = ah_turn(store);
    begun = __rdtsc();
    ah_copy(to, from, bytes, past);
    ah_note(store, past, (__rdtsc() - begun) * TIMED_BYTES / bytes);
    if (past != store->past)
        ah_judge(store);
}
#else
void ah_fill(struct ah_store *store, unsigned char *to, const unsigned char *from, size_t bytes)
{
    (void)store;
    ah_copy(to, from, bytes, 0);
}
#endif
