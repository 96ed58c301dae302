/* The beginning and the end of a call: each rank writes what it calls on a fingerprint, and whoever waits for another compares
 * the two before it touches data. Small data stands on the fingerprint, or on the sheet that belongs to it.
 *
 * Each rank has a ring of fingerprints, one for each of its last AH_CALL_DEPTH calls. Most operations wait for everyone's fingerprint
 * (ah_call_compare_all). Where a rank needs nothing from others, it leaves its fingerprint and goes on (ah_call_end_uncompared); it compares that call with
 * theirs later: before and while it next waits for everyone, or when its ring is full. A fingerprint is written again once everyone has said
 * (`checked`) that it needs it no more, so nobody is more than AH_CALL_DEPTH ahead of anyone.
 *
 * That is enough to find every difference: a rank compares its call at least with that of the root it named, and whoever
 * takes itself for the root compares with all, before anyone gets through the next call that has no root. */
#ifndef ALLHANDS_CARD_H
#define ALLHANDS_CARD_H

#include "shm/segment.h"

/* The fingerprint of `rank` for the call that runs. */
static inline struct ah_fingerprint *ah_fingerprint_of(const struct ah_group *group, uint32_t rank)
{
    return &group->members[rank].fingerprints[group->call.sequence % AH_CALL_DEPTH];
}

/* Where `rank` has `bytes` of data beside the call that runs; at most AH_PAYLOAD_BYTES. */
static inline unsigned char *ah_payload_of(const struct ah_group *group, uint32_t rank, size_t bytes)
{
    size_t sheet = (size_t)rank * AH_CALL_DEPTH + group->call.sequence % AH_CALL_DEPTH;

    return bytes <= AH_INLINE_BYTES ? ah_fingerprint_of(group, rank)->inline_payload : group->payloads + sheet * AH_PAYLOAD_BYTES;
}

/* Begin a call and write our fingerprint, once there is reusable for it; the caller adds the data and publishes it. Where ranks may differ
 * in the size of their parts, `bytes` is that of one (AH_NO_PAYLOAD: it goes through the slots) and `largest` that of our largest;
 * else both are 0. They stand there also where the group has ended, for whoever asks then what each rank called. */
int ah_call_begin(struct ah_group *group, const struct ah_call *call, uint32_t bytes, size_t largest, int64_t timeout_ns);

/* Show our fingerprint to others: it and all data beside it are written. */
void ah_call_publish(struct ah_group *group);

/* Wait for everyone's fingerprint and compare. AH_MISMATCH ends the group. */
int ah_call_compare_all(struct ah_group *group);

/* Wait for the fingerprint of `rank` alone and compare. */
int ah_call_compare_one(struct ah_group *group, uint32_t rank);

/* End a call that waited for all it had to compare with. */
void ah_call_end(struct ah_group *group);

/* End a call that did not; it is compared later. */
void ah_call_end_uncompared(struct ah_group *group);

/* End a call whose chunks took the tickets up to `ticket`: all our counters stand there. */
void ah_call_end_chunks(struct ah_group *group, uint32_t ticket);

/* The group is over because what `rank` calls does not fit. Returns AH_MISMATCH. */
int ah_call_mismatch(struct ah_group *group, uint32_t rank);

#endif
