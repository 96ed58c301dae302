/* What one rank of a group over MPI calls, as ranks tell each other before a result is returned. The same bytes as those
 * of engines/fingerprint.py, which says in words what is wrong where records differ. */
#ifndef ALLHANDS_RECORD_H
#define ALLHANDS_RECORD_H

#include <stddef.h>
#include <stdint.h>

#include "recorder/flight_recorder.h"

/* Bits of `flags`. */
#define AH_UNEVEN 1u  /* its parts differ in size, so sizes are compared pair by pair */
#define AH_REFUSED 2u /* it cannot make its call */

/* A shape or a place in a script of more than this says no more to a reader. */
#define AH_RECORD_WORDS 60

/* So much text makes it four cache lines. */
#define AH_RECORD_TEXT 216

struct ah_record {
    uint64_t sequence, bytes;
    uint32_t kind, reduction, dtype;
    int32_t root; /* -1 for none */
    uint32_t flags;
    uint32_t length; /* of the text */
    char text[AH_RECORD_TEXT]; /* shape, place and refusal, with a byte 31 between them */
};

/* Data of so few bytes comes with the record. It costs no message of its own; more would cost every call its time. */
#define AH_RECORD_ROOM 256

struct ah_sheet {
    struct ah_record record;
    unsigned char room[AH_RECORD_ROOM];
};

/* How records stand to each other. */
enum ah_likeness { AH_ALIKE, AH_ALIKE_BUT_SIZES, AH_UNLIKE };

/* Write the words of a record: of the shape the beginning, of the place the end. */
void ah_record_say(struct ah_record *record, const char *shape, const char *site, const char *refused);

/* The same from the note of a call. */
void ah_record_quote(struct ah_record *record, const struct ah_entry *note);

/* Compare everyone's: sizes are left out where someone's parts differ in size. */
enum ah_likeness ah_records_compare(const struct ah_sheet *sheets, uint32_t ranks, uint32_t rank);

#endif
