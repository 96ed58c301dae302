/* Writing what another rank is to read, by way of the caches or past them. Where two cores share a cache, the reader finds it there;
 * where they share none, fetching each line from the other core for writing takes longer than all of memory: past the caches all_reduce
 * of 16 MiB with 2 ranks takes 2.3 ms there in place of 9.2, and 2.8 in place of 1.5 where they do share one. Which it is can change
 * while a program runs: a virtual machine's cores move. So each write is timed, and now and then one goes the other way. */
#ifndef ALLHANDS_STORE_H
#define ALLHANDS_STORE_H

#include <stddef.h>
#include <stdint.h>

/* Of one thread at a time. Zeros are a fresh one. */
struct ah_store {
    int past;          /* past the caches */
    uint32_t turn;     /* how often it was done */
    uint32_t alike;    /* how often running the other way was better */
    uint64_t ticks[2]; /* what each way took of late, for as many bytes */
};

/* Copy to memory that another rank reads next. */
void ah_fill(struct ah_store *store, unsigned char *to, const unsigned char *from, size_t bytes);

/* Which way the next write goes: past the caches or not. */
int ah_turn(struct ah_store *store);

/* Note that a write took so many ticks, `past` the caches or not. */
void ah_note(struct ah_store *store, int past, uint64_t ticks);

/* Decide which way is better, after the other one was timed. */
void ah_judge(struct ah_store *store);

#endif
