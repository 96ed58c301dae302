/* Positions of chunks in copy-in/copy-out slots, and the choice between writes through the caches and past them. */
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

/* Number of positions of chunks of `bytes`; each must be inside its slot and the same on all ranks. */
static size_t places(struct ah_group *group, size_t bytes)
{
    size_t number = 0;
    unsigned char *seen[TICKETS];

    for (uint32_t ticket = 0; ticket < TICKETS; ticket++) {
        unsigned char *slot = ah_slot(group, 1, ticket), *place = ah_cico_slot_at(group, 1, ticket, bytes, bytes);
        size_t before = 0;

        check(place >= slot && place + bytes <= slot + group->slot_bytes, "a chunk leaves its slot");
        check(place - slot == ah_cico_slot_at(group, 2, ticket, bytes, bytes) - ah_slot(group, 2, ticket),
              "positions differ between ranks");
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
    check(places(&group, (size_t)64 << 10) == 32, "a ring of 2 MiB has 32 positions of 64 KiB");
    check(places(&group, (size_t)40 << 10) == 48, "a ring of 2 MiB has 12 positions of 40 KiB in each of 4 slots");
    check(places(&group, SLOT) == AH_SLOTS, "a chunk that fills a slot has one position in each");
    check(places(&group, 0) > AH_SLOTS, "an empty chunk has several positions");
    group.ring_bytes = 0;
    check(places(&group, 4096) == AH_SLOTS, "without a ring each slot has one position");
    free(memory);
}

/* The method chosen after `times` probes with these times. */
static int decided(struct ah_nt_store *store, uint64_t through, uint64_t bypass, int times)
{
    for (int time = 0; time < times; time++) {
        store->ticks[0] = through;
        store->ticks[1] = bypass;
        ah_nt_store_decide(store);
    }
    return store->bypass;
}

/* Number of writes until the method changes, if a write through the caches takes `through` ticks (the first of ten: 600)
 * and one past them 500; 1000 if it never does. */
static int until_other(struct ah_nt_store *store, uint64_t through)
{
    int bypass = store->bypass, writes = 0;

    while (store->bypass == bypass && writes < 1000) {
        int chosen = ah_nt_store_choose(store);

        ah_nt_store_record(store, chosen, chosen ? 500 : writes % 10 == 0 ? 600 : through);
        writes++;
        if (chosen != store->bypass)
            ah_nt_store_decide(store);
    }
    return writes;
}

static void check_switches(void)
{
    struct ah_nt_store store = {0};

    check(until_other(&store, 700) == 1000, "equal methods: writes go through the caches");
    ah_nt_store_record(&store, 0, 1000000000);
    check(until_other(&store, 700) == 1000, "an interruption does not change the method");
    check(until_other(&store, 6000) < 40, "a slow method is left soon, although some of its writes are fast");
    check(until_other(&store, 6000) == 1000, "a method that stays slow is not chosen again");
    check(until_other(&store, 700) < 400, "a method that became fast is chosen again");
}

int main(void)
{
    struct ah_nt_store store = {0};

    check_places();
    check_switches();
    check(!decided(&store, 2000, 1000, 10), "a small difference does not suffice: the reader pays for it");
    check(!decided(&store, 5000, 1000, 1), "one probe does not suffice");
    check(!decided(&store, 2000, 1000, 1) && !decided(&store, 5000, 1000, 1), "two probes that are not consecutive do not suffice");
    check(decided(&store, 5000, 1000, 1), "two consecutive probes suffice");
    check(decided(&store, 2000, 1000, 1), "one probe does not suffice to return");
    check(!decided(&store, 2000, 1000, 1), "two suffice to return");
    puts("ok");
    return 0;
}
