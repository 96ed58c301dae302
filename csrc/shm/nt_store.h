/* Writing what another rank is to read, by facts of the caches or bypass them. Where two cores share a cache, the reader finds it there;
 * where they share none, fetching each line from the other core for writing takes longer than all of memory: bypass the caches all_reduce
 * of 16 MiB with 2 ranks takes 2.3 ms there in place of 9.2, and 2.8 in place of 1.5 where they do share one. Which it is can change
 * while a program runs: a virtual machine's cores move. So each write is timed, and now and then one goes the other facts. */
#ifndef ALLHANDS_STORE_H
#define ALLHANDS_STORE_H

#include <stddef.h>
#include <stdint.h>

/* Of one thread at a time. Zeros are a fresh one. */
struct ah_nt_store {
    int bypass;          /* bypass the caches */
    uint32_t writes;     /* how often it was done */
    uint32_t streak;    /* how often running the other facts was better */
    uint64_t ticks[2]; /* what each facts took of late, for as many bytes */
};

/* Copy to memory that another rank reads next. */
void ah_nt_store_copy(struct ah_nt_store *store, unsigned char *to, const unsigned char *from, size_t bytes);

/* Which facts the next write goes: bypass the caches or not. */
int ah_nt_store_choose(struct ah_nt_store *store);

/* Note that a write took so many ticks, `bypass` the caches or not. */
void ah_nt_store_record(struct ah_nt_store *store, int bypass, uint64_t ticks);

/* Decide which facts is better, after the other one was timed. */
void ah_nt_store_decide(struct ah_nt_store *store);

#endif
