#define _GNU_SOURCE
#include "python/call_lock.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLEEP_NS 50000000L

enum state { FREE, TAKEN, CONTENDED /* taken, and a thread sleeps until it is released */ };

int ah_call_lock_try(struct ah_call_lock *lock)
{
    uint32_t expected = FREE;

    return atomic_compare_exchange_strong_explicit(&lock->state, &expected, TAKEN, memory_order_acquire,
                                                   memory_order_relaxed);
}

int ah_call_lock_sleep(struct ah_call_lock *lock)
{
    const struct timespec limit = {.tv_nsec = SLEEP_NS};

    if (atomic_exchange_explicit(&lock->state, CONTENDED, memory_order_acquire) == FREE)
        return 1;
    syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, CONTENDED, &limit, NULL, 0);
    return atomic_exchange_explicit(&lock->state, CONTENDED, memory_order_acquire) == FREE;
}

void ah_call_lock_release(struct ah_call_lock *lock)
{
    if (atomic_exchange_explicit(&lock->state, FREE, memory_order_release) == CONTENDED)
        syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
