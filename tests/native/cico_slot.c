/* Where the chunks of tickets stand, and how it is decided in which facts they are written. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shm/cico_slot.h"

#define RANKS 3
#define SLOT ((size_t)1 << 20)
#define TICKETS 400

static const unsigned char NONCE[16] = "a segment's slot";

static void check(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* Chunks of `bytes`: how many places they have in all, each inside its slot, clear of the other slots, and alike on all ranks. */
static size_t places(struct ah_group *group, size_t bytes)
{
    size_t number = 0;
    unsigned char *seen[TICKETS];

    for (uint32_t ticket = 0; ticket < TICKETS; ticket++) {
        unsigned char *slot = ah_slot(group, 1, ticket), *place = ah_cico_slot_at(group, 1, ticket, bytes, bytes);
        size_t before = 0;

        check(place >= slot && place + bytes <= slot + group->slot_bytes, "a chunk leaves its slot");
        check(place - slot == ah_cico_slot_at(group, 2, ticket, bytes, bytes) - ah_slot(group, 2, ticket), "ranks differ in a place");
        while (before < number && seen[before] != place)
            before++;
        if (before == number)
            seen[number++] = place;
    }
    return number;
}

static void check_places(void)
{
    size_t bytes = ah_segment_bytes(RANKS, SLOT, 0);
    void *memory = aligned_alloc(4096, bytes);
    struct ah_group group;

    check(memory != NULL, "no memory");
    memset(memory, 0, bytes);
    ah_segment_format(memory, RANKS, SLOT, 0, 0, NONCE);
    check(ah_segment_open(&group, memory, bytes, 0, NONCE, NULL) == AH_OK, "not a segment");
    group.ring_bytes = (size_t)2 << 20;
    check(places(&group, (size_t)64 << 10) == 32, "a ring of 2 MiB has 32 places of 64 KiB");
    check(places(&group, (size_t)40 << 10) == 48, "and 12 of 40 KiB in each of 4 slots");
    check(places(&group, SLOT) == AH_SLOTS, "what fills a slot has one place in each");
    check(places(&group, 0) > AH_SLOTS, "and nothing has many");
    group.ring_bytes = 0;
    check(places(&group, 4096) == AH_SLOTS, "without a ring there is one place in each slot");
    free(memory);
}

/* What is decided after both ways took so long, so many times. */
static int decided(struct ah_nt_store *store, uint64_t through, uint64_t bypass, int times)
{
    for (int time = 0; time < times; time++) {
        store->ticks[0] = through;
        store->ticks[1] = bypass;
        ah_nt_store_decide(store);
    }
    return store->bypass;
}

/* How many writes it takes until they go the other facts, where one through the caches takes `through` ticks, but for the first of each
 * ten, and one bypass them 500; 1000 where they never do. */
static int until_other(struct ah_nt_store *store, uint64_t through)
{
    int bypass = store->bypass, writes = 0;

    while (store->bypass == bypass && writes < 1000) {
        int facts = ah_nt_store_choose(store);

        ah_nt_store_record(store, facts, facts ? 500 : writes % 10 == 0 ? 600 : through);
        writes++;
        if (facts != store->bypass)
            ah_nt_store_decide(store);
    }
    return writes;
}

static void check_notes(void)
{
    struct ah_nt_store store = {0};

    check(until_other(&store, 700) == 1000, "where one is as fast as the other, they go through the caches");
    ah_nt_store_record(&store, 0, 1000000000);
    check(until_other(&store, 700) == 1000, "also after an interruption");
    check(until_other(&store, 6000) < 40, "what is slow is seen soon, though some of it is fast");
    check(until_other(&store, 6000) == 1000, "and is not taken up again");
    check(until_other(&store, 700) < 400, "before it is fast");
}

int main(void)
{
    struct ah_nt_store store = {0};

    check_places();
    check_notes();
    check(!decided(&store, 2000, 1000, 10), "a little slower is no reason to go bypass the caches: who reads pays for it");
    check(!decided(&store, 5000, 1000, 1), "once may be chance");
    check(!decided(&store, 2000, 1000, 1) && !decided(&store, 5000, 1000, 1), "and so may be twice, not running");
    check(decided(&store, 5000, 1000, 1), "twice running is not");
    check(decided(&store, 2000, 1000, 1), "nor is once enough to come back");
    check(!decided(&store, 2000, 1000, 1), "twice is");
    puts("ok");
    return 0;
}
