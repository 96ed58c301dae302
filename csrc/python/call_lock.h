/* The call lock of a segment: one call at a time. Not one of Python's locks: taking a free one reads the clock first,
 * which costs a small call a tenth of its time. */
#ifndef ALLHANDS_CALL_LOCK_H
#define ALLHANDS_CALL_LOCK_H

#include <stdint.h>

/* Zero is the initial state. */
struct ah_call_lock {
    _Atomic uint32_t state;
};

/* Try to take the lock; nonzero if it was free. */
int ah_call_lock_try(struct ah_call_lock *lock);

/* Sleep until the lock may be free, at most 50 ms, so that the caller can run signal handlers; nonzero if it is
 * taken now. */
int ah_call_lock_sleep(struct ah_call_lock *lock);

void ah_call_lock_release(struct ah_call_lock *lock);

#endif
