/* Begin and end of a call. Each rank publishes the fingerprint of its call, and compares it with a peer's before it
 * touches the peer's data. Small data is in the fingerprint, or in the page of payload that belongs to it.
 *
 * Each rank has a ring of fingerprints, for its last AH_CALL_DEPTH calls. Most operations wait for all fingerprints
 * (ah_call_compare_all). A rank that needs nothing from others publishes and returns (ah_call_end_uncompared); it
 * compares that call later: before and during its next call that waits for all ranks, or when the ring is full. A
 * fingerprint is reused once every rank has set `checked` beyond it, so no rank is more than AH_CALL_DEPTH calls
 * ahead.
 *
 * This finds every mismatch: a rank compares its call at least with that of its root, and a rank that is a root
 * compares with all ranks before any rank completes the next call without a root. */
#ifndef ALLHANDS_FINGERPRINT_H
#define ALLHANDS_FINGERPRINT_H

#include "shm/segment.h"

/* The fingerprint of `rank` for the current call. */
static inline struct ah_fingerprint *ah_fingerprint_of(const struct ah_group *group, uint32_t rank)
{
    return &group->members[rank].fingerprints[group->call.sequence % AH_CALL_DEPTH];
}

/* The payload of `rank` for the current call; `bytes` is at most AH_PAYLOAD_BYTES. */
static inline unsigned char *ah_payload_of(const struct ah_group *group, uint32_t rank, size_t bytes)
{
    size_t page = (size_t)rank * AH_CALL_DEPTH + group->call.sequence % AH_CALL_DEPTH;

    return bytes <= AH_INLINE_BYTES ? ah_fingerprint_of(group, rank)->inline_payload
                                    : group->payloads + page * AH_PAYLOAD_BYTES;
}

/* Begin a call: write our fingerprint once its place is free; the caller adds the payload and publishes it. Where
 * ranks may differ in the size of their parts, `bytes` is the size of one (AH_NO_PAYLOAD: data goes through the
 * slots) and `largest` that of our largest; else both are 0. They are written even if the group has ended, for
 * reports. */
int ah_call_begin(struct ah_group *group, const struct ah_call *call, uint32_t bytes, size_t largest,
                  int64_t timeout_ns);

/* Publish our fingerprint; it and its payload are written. */
void ah_call_publish(struct ah_group *group);

/* Wait for all fingerprints and compare. AH_MISMATCH ends the group. */
int ah_call_compare_all(struct ah_group *group);

/* Wait for the fingerprint of `rank` only and compare. */
int ah_call_compare_one(struct ah_group *group, uint32_t rank);

/* End a call that was compared with all ranks that it depends on. */
void ah_call_end(struct ah_group *group);

/* End a call that was not compared yet. */
void ah_call_end_uncompared(struct ah_group *group);

/* End a call that used the tickets below `ticket`: sets all counters to it. */
void ah_call_end_chunks(struct ah_group *group, uint32_t ticket);

/* End the group because the call of `rank` differs. Returns AH_MISMATCH. */
int ah_call_mismatch(struct ah_group *group, uint32_t rank);

#endif
