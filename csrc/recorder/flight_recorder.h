/* The flight recorder: the current and last calls of this process in its groups, in memory that other processes can
 * read while it hangs. One thread writes at a time (the GIL ensures that). */
#ifndef ALLHANDS_FLIGHT_RECORDER_H
#define ALLHANDS_FLIGHT_RECORDER_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Enough for many overlapping calls and the last complete ones. */
#define AH_RECORDER_ENTRIES 32

/* Recorded dimensions; tensors with more are rare. */
#define AH_ENTRY_DIMS 6

enum ah_entry_state { AH_ENTRY_FREE, AH_ENTRY_WAITING, AH_ENTRY_RUNNING, AH_ENTRY_DONE, AH_ENTRY_FAILED };

/* src/allhands/observe/flight_recorder.py has this layout too: a change needs a new AH_RECORDER_VERSION. */
struct ah_entry {
    alignas(64) _Atomic uint64_t stamp; /* odd while the entry is being written */
    uint64_t number;                    /* of all entries of the process, from 1 */
    uint64_t sequence;                  /* of the call in its group */
    uint64_t bytes;
    int64_t issued_ns, started_ns, ended_ns; /* CLOCK_MONOTONIC; 0 for not yet */
    uint32_t state;
    uint32_t main_thread; /* whether the main thread runs it */
    int32_t root;         /* in the group; -1 for none */
    uint32_t dims;        /* of the tensor, also beyond AH_ENTRY_DIMS */
    uint64_t shape[AH_ENTRY_DIMS];
    char operation[24], group[24], dtype[12], reduction[12], site[64];
};

struct ah_flight_recorder_header {
    char magic[8];
    uint32_t version, entries;
    int64_t pid;
    int32_t rank, world_size;
    uint64_t last; /* number of the last entry */
};

struct ah_flight_recorder {
    struct ah_flight_recorder_header *header;
    struct ah_entry *entries;
};

size_t ah_flight_recorder_bytes(void);

/* Make `memory`, `ah_flight_recorder_bytes` of zeros, the recorder of this process. */
void ah_flight_recorder_format(struct ah_flight_recorder *recorder, void *memory, int64_t pid);

/* Take a free entry, else the one that ended longest ago, else the oldest. The caller fills it in and calls
 * `ah_entry_set_state`. */
struct ah_entry *ah_entry_begin(struct ah_flight_recorder *recorder);

/* Set the state of an entry, with the time. */
void ah_entry_set_state(struct ah_entry *entry, enum ah_entry_state state);

/* The entry `number` if it is still recorded, else NULL. */
struct ah_entry *ah_entry_find(struct ah_flight_recorder *recorder, uint64_t number);

/* Copy `text` into a field of `size`, cut at the front: the end of a path and its line identify more. */
void ah_entry_text(char *field, size_t size, const char *text);

#endif
