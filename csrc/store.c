#include "store.h"

#include "copy.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* What is timed: more than a timer's own time, and as much as a block of results has in one piece. */
#define TIMED_BYTES ((size_t)8 << 10)

/* Less than this goes by way of the caches: it is there before the reader looks. */
#define SMALL_BYTES ((size_t)4 << 10)

/* One in so many goes the other way: the worse takes up to ten times as long. A prime, so that calls that all write as often do not
 * send the same of their chunks there each time. */
#define OTHER_EVERY 61

/* A mean of the last ones, about so many: of the way that is taken more than a call's, whose first writes are faster than its others;
 * of the other one few, because it is taken seldom. */
#define MEAN_TAKEN 32
#define MEAN_OTHER 4

/* More than this was no write but an interruption. Where no cache is shared it takes a third. */
#define MOST_TICKS ((uint64_t)1 << 15)

/* How many times running the other way has to be better: what the system did meanwhile must not decide. */
#define TIMED_ALIKE 2

/* Whoever reads what went past the caches fetches it from memory, which takes longer than from a cache that both cores share, but
 * not longer than from one that only the other core has. */
void ah_judge(struct ah_store *store)
{
    int past = 2 * store->ticks[0] > 5 * store->ticks[1];

    store->alike = past != store->past ? store->alike + 1 : 0;
    if (store->alike == TIMED_ALIKE) {
        store->past = past;
        store->alike = 0;
    }
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
    int past = store->past;
    uint64_t begun;

    if (bytes < TIMED_BYTES) {
        ah_copy(to, from, bytes, past && bytes > SMALL_BYTES);
        return;
    }
    if (store->turn++ % OTHER_EVERY == 0)
        past = !past;
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
