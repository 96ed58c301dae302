/* Copies into memory that another rank reads next, through the caches or bypassing them (non-temporal stores). If two
 * cores share a cache the reader hits it; if they share none, fetching each line from the other core for ownership
 * costs more than a write to memory: all_reduce of 16 MiB with 2 ranks takes 2.3 ms bypassing and 9.2 through the
 * caches there, but 2.8 against 1.5 where they share one. This can change at run time, because a virtual machine's
 * cores move. So writes are timed, and now and then one probes the other method. */
#ifndef ALLHANDS_NT_STORE_H
#define ALLHANDS_NT_STORE_H

#include <stddef.h>
#include <stdint.h>

/* Used by one thread at a time. Zeros are the initial state. */
struct ah_nt_store {
    int bypass;          /* whether writes bypass the caches */
    uint32_t writes;     /* number of writes */
    uint32_t streak;     /* consecutive probes in which the other method was better */
    uint64_t ticks[2];   /* mean ticks of each method for TIMED_BYTES */
};

/* Copy to memory that another rank reads next. */
void ah_nt_store_copy(struct ah_nt_store *store, unsigned char *to, const unsigned char *from, size_t bytes);

/* Choose the method of the next write: nonzero bypasses the caches. */
int ah_nt_store_choose(struct ah_nt_store *store);

/* Record the ticks of a write. */
void ah_nt_store_record(struct ah_nt_store *store, int bypass, uint64_t ticks);

/* Switch the method if the other one was better often enough. */
void ah_nt_store_decide(struct ah_nt_store *store);

#endif
