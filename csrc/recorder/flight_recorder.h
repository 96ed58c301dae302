/* The board: what this process is doing in its groups, and the last things it did, in memory of its own that
 * other processes can read while it hangs. One thread at a time writes (the interpreter's lock sees to that). */
#ifndef ALLHANDS_BOARD_H
#define ALLHANDS_BOARD_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* A rank that overlaps many operations still has the last few done ones beside those under way. */
#define AH_BOARD_NOTES 32

/* Dimensions that are noted; tensors with more are rare, and their first ones tell them apart. */
#define AH_BOARD_DIMS 6

enum ah_note_state { AH_NOTE_FREE, AH_NOTE_WAITING, AH_NOTE_RUNNING, AH_NOTE_DONE, AH_NOTE_FAILED };

/* Its layout is known to src/allhands/notes.py too: a change needs a new AH_BOARD_VERSION. */
struct ah_note {
    alignas(64) _Atomic uint64_t stamp; /* odd while the note is being written */
    uint64_t number;                    /* runs through all notes of the process, from 1 */
    uint64_t sequence;                  /* of the call in its group */
    uint64_t bytes;
    int64_t issued_ns, started_ns, ended_ns; /* CLOCK_MONOTONIC; 0 for not yet */
    uint32_t state;
    uint32_t main;   /* whether the main thread runs it */
    int32_t root;    /* in the group; -1 for none */
    uint32_t dims;   /* how many the tensor has, also beyond AH_BOARD_DIMS */
    uint64_t shape[AH_BOARD_DIMS];
    char operation[24], group[24], dtype[12], reduction[12], site[64];
};

struct ah_board_head {
    char magic[8];
    uint32_t version, notes;
    int64_t pid;
    int32_t rank, world_size;
    uint64_t last; /* number of the last note */
};

struct ah_board {
    struct ah_board_head *head;
    struct ah_note *notes;
};

size_t ah_board_bytes(void);

/* Make `memory`, `ah_board_bytes` of zeros, the board of this process. */
void ah_board_format(struct ah_board *board, void *memory, int64_t pid);

/* Take a free place, or the one that was done longest ago, or if all are under way the oldest. The caller fills
 * in the note and then calls `ah_note_set`. */
struct ah_note *ah_note_begin(struct ah_board *board);

/* Show the note in `state`, with the time of that. */
void ah_note_set(struct ah_note *note, enum ah_note_state state);

/* The note `number` if it still stands on the board, else NULL. */
struct ah_note *ah_note_find(struct ah_board *board, uint64_t number);

/* Copy `text` into a field of `size`, cut at the front: the end of a path and its line tell more. */
void ah_note_text(char *field, size_t size, const char *text);

#endif
