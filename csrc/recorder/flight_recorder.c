#define _GNU_SOURCE
#include "recorder/flight_recorder.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#define AH_RECORDER_VERSION 1

/* The entries begin on a page of their own. */
#define HEADER_BYTES 4096

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

size_t ah_flight_recorder_bytes(void)
{
    return HEADER_BYTES + AH_RECORDER_ENTRIES * sizeof(struct ah_entry);
}

void ah_flight_recorder_format(struct ah_flight_recorder *recorder, void *memory, int64_t pid)
{
    recorder->header = memory;
    recorder->entries = (struct ah_entry *)((unsigned char *)memory + HEADER_BYTES);
    recorder->header->version = AH_RECORDER_VERSION;
    recorder->header->entries = AH_RECORDER_ENTRIES;
    recorder->header->pid = pid;
    recorder->header->rank = -1;
    memcpy(recorder->header->magic, "allboard", sizeof recorder->header->magic);
}

static int in_progress(const struct ah_entry *entry)
{
    return entry->state == AH_ENTRY_WAITING || entry->state == AH_ENTRY_RUNNING;
}

/* One thread writes at a time, so the stamp needs no atomic read-modify-write, which would wait for all earlier stores
 * of the call. */
static void open_entry(struct ah_entry *entry)
{
    uint64_t stamp = atomic_load_explicit(&entry->stamp, memory_order_relaxed);

    if (stamp % 2 == 0)
        atomic_store_explicit(&entry->stamp, stamp + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

struct ah_entry *ah_entry_begin(struct ah_flight_recorder *recorder)
{
    uint64_t number = ++recorder->header->last;
    struct ah_entry *entry = &recorder->entries[number % AH_RECORDER_ENTRIES];

    /* Usually the next place is free; otherwise take the oldest entry that is complete. */
    if (in_progress(entry)) {
        struct ah_entry *oldest = NULL;

        for (size_t index = 0; index < AH_RECORDER_ENTRIES; index++) {
            struct ah_entry *each = &recorder->entries[index];

            if (!in_progress(each) && (!oldest || each->number < oldest->number))
                oldest = each;
        }
        entry = oldest ? oldest : entry;
    }
    open_entry(entry);
    entry->number = number;
    entry->started_ns = entry->ended_ns = 0;
    return entry;
}

void ah_entry_set_state(struct ah_entry *entry, enum ah_entry_state state)
{
    int64_t now = now_ns();

    open_entry(entry);
    if (entry->state == AH_ENTRY_FREE || !in_progress(entry))
        entry->issued_ns = now;
    if (state == AH_ENTRY_RUNNING)
        entry->started_ns = now;
    if (state == AH_ENTRY_DONE || state == AH_ENTRY_FAILED)
        entry->ended_ns = now;
    entry->state = state;
    atomic_store_explicit(&entry->stamp, atomic_load_explicit(&entry->stamp, memory_order_relaxed) + 1,
                          memory_order_release);
}

struct ah_entry *ah_entry_find(struct ah_flight_recorder *recorder, uint64_t number)
{
    struct ah_entry *entry = &recorder->entries[number % AH_RECORDER_ENTRIES];

    if (entry->number == number)
        return entry;
    for (size_t index = 0; index < AH_RECORDER_ENTRIES; index++) {
        if (recorder->entries[index].number == number)
            return &recorder->entries[index];
    }
    return NULL;
}

void ah_entry_text(char *field, size_t size, const char *text)
{
    size_t length = strlen(text);

    if (length > size - 1) {
        text += length - (size - 1);
        length = size - 1;
    }
    memcpy(field, text, length);
    memset(field + length, 0, size - length);
}
