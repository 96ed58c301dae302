/* The beginning and the end of a call: each rank writes what it calls on a card, and whoever waits for another compares
 * the two before it touches data. Small data stands on the card, or on the sheet that belongs to it.
 *
 * Each rank has a ring of cards, one for each of its last AH_CALLS calls. Most operations wait for everyone's card
 * (ah_meet). Where a rank needs nothing from others, it leaves its card and goes on (ah_leave); it compares that call with
 * theirs later: before and while it next waits for everyone, or when its ring is full. A card is written again once everyone has said
 * (`checked`) that it needs it no more, so nobody is more than AH_CALLS ahead of anyone.
 *
 * That is enough to find every difference: a rank compares its call at least with that of the root it named, and whoever
 * takes itself for the root compares with all, before anyone gets through the next call that has no root. */
#ifndef ALLHANDS_CARD_H
#define ALLHANDS_CARD_H

#include "shm/segment.h"

/* The card of `rank` for the call that runs. */
static inline struct ah_card *ah_card_of(const struct ah_group *group, uint32_t rank)
{
    return &group->members[rank].cards[group->call.sequence % AH_CALLS];
}

/* Where `rank` has `bytes` of data beside the call that runs; at most AH_SHEET_BYTES. */
static inline unsigned char *ah_beside(const struct ah_group *group, uint32_t rank, size_t bytes)
{
    size_t sheet = (size_t)rank * AH_CALLS + group->call.sequence % AH_CALLS;

    return bytes <= AH_SMALL ? ah_card_of(group, rank)->small : group->sheets + sheet * AH_SHEET_BYTES;
}

/* Begin a call and write our card, once there is room for it; the caller adds the data and publishes it. Where ranks may differ
 * in the size of their parts, `bytes` is that of one (AH_LONG: it goes through the slots) and `largest` that of our largest;
 * else both are 0. They stand there also where the group has ended, for whoever asks then what each rank called. */
int ah_begin(struct ah_group *group, const struct ah_call *call, uint32_t bytes, size_t largest, int64_t timeout_ns);

/* Show our card to others: it and all data beside it are written. */
void ah_publish(struct ah_group *group);

/* Wait for everyone's card and compare. AH_MISMATCH ends the group. */
int ah_meet(struct ah_group *group);

/* Wait for the card of `rank` alone and compare. */
int ah_meet_one(struct ah_group *group, uint32_t rank);

/* End a call that waited for all it had to compare with. */
void ah_close(struct ah_group *group);

/* End a call that did not; it is compared later. */
void ah_leave(struct ah_group *group);

/* End a call whose chunks took the tickets up to `ticket`: all our counters stand there. */
void ah_finish(struct ah_group *group, uint32_t ticket);

/* The group is over because what `rank` calls does not fit. Returns AH_MISMATCH. */
int ah_differ(struct ah_group *group, uint32_t rank);

#endif
