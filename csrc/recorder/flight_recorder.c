#define _GNU_SOURCE
#include "recorder/flight_recorder.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#define AH_BOARD_VERSION 1

/* The notes begin on a page of their own. */
#define HEAD_BYTES 4096

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

size_t ah_board_bytes(void)
{
    return HEAD_BYTES + AH_BOARD_NOTES * sizeof(struct ah_note);
}

void ah_board_format(struct ah_board *board, void *memory, int64_t pid)
{
    board->head = memory;
    board->notes = (struct ah_note *)((unsigned char *)memory + HEAD_BYTES);
    board->head->version = AH_BOARD_VERSION;
    board->head->notes = AH_BOARD_NOTES;
    board->head->pid = pid;
    board->head->rank = -1;
    memcpy(board->head->magic, "allboard", sizeof board->head->magic);
}

static int under_way(const struct ah_note *note)
{
    return note->state == AH_NOTE_WAITING || note->state == AH_NOTE_RUNNING;
}

/* One thread at a time writes, so the stamp needs no step that cannot be divided: that would wait until others have seen
 * all that a call has stored before it. */
static void open_note(struct ah_note *note)
{
    uint64_t stamp = atomic_load_explicit(&note->stamp, memory_order_relaxed);

    if (stamp % 2 == 0)
        atomic_store_explicit(&note->stamp, stamp + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

struct ah_note *ah_note_begin(struct ah_board *board)
{
    uint64_t number = ++board->head->last;
    struct ah_note *note = &board->notes[number % AH_BOARD_NOTES];

    /* Mostly the next place is free; where it is not, look for the oldest of those that are done. */
    if (under_way(note)) {
        struct ah_note *oldest = NULL;

        for (size_t index = 0; index < AH_BOARD_NOTES; index++) {
            struct ah_note *each = &board->notes[index];

            if (!under_way(each) && (!oldest || each->number < oldest->number))
                oldest = each;
        }
        note = oldest ? oldest : note;
    }
    open_note(note);
    note->number = number;
    note->started_ns = note->ended_ns = 0;
    return note;
}

void ah_note_set(struct ah_note *note, enum ah_note_state state)
{
    int64_t now = now_ns();

    open_note(note);
    if (note->state == AH_NOTE_FREE || !under_way(note))
        note->issued_ns = now;
    if (state == AH_NOTE_RUNNING)
        note->started_ns = now;
    if (state == AH_NOTE_DONE || state == AH_NOTE_FAILED)
        note->ended_ns = now;
    note->state = state;
    atomic_store_explicit(&note->stamp, atomic_load_explicit(&note->stamp, memory_order_relaxed) + 1, memory_order_release);
}

struct ah_note *ah_note_find(struct ah_board *board, uint64_t number)
{
    struct ah_note *note = &board->notes[number % AH_BOARD_NOTES];

    if (note->number == number)
        return note;
    for (size_t index = 0; index < AH_BOARD_NOTES; index++) {
        if (board->notes[index].number == number)
            return &board->notes[index];
    }
    return NULL;
}

void ah_note_text(char *field, size_t size, const char *text)
{
    size_t length = strlen(text);

    if (length > size - 1) {
        text += length - (size - 1);
        length = size - 1;
    }
    memcpy(field, text, length);
    memset(field + length, 0, size - length);
}
