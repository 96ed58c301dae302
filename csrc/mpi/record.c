#define _GNU_SOURCE
#include "mpi/record.h"

#include <string.h>

#define BETWEEN '\x1f'

_Static_assert(sizeof(struct ah_record) == 256 && offsetof(struct ah_record, text) == 40, "as Python reads it");

static size_t put(struct ah_record *record, size_t at, const char *words, size_t bytes)
{
    if (bytes > AH_RECORD_TEXT - at)
        bytes = AH_RECORD_TEXT - at;
    memcpy(record->text + at, words, bytes);
    return at + bytes;
}

static size_t put_separator(struct ah_record *record, size_t at)
{
    const char separator = BETWEEN;

    return put(record, at, &separator, 1);
}

/* The end of a long path is what tells it from others. */
static size_t put_site(struct ah_record *record, size_t at, const char *site, size_t bytes)
{
    size_t left_out = bytes > AH_RECORD_WORDS ? bytes - AH_RECORD_WORDS : 0;

    return put(record, put_separator(record, at), site + left_out, bytes - left_out);
}

void ah_record_say(struct ah_record *record, const char *shape, const char *site, const char *refused)
{
    size_t bytes = strlen(shape), at = put(record, 0, shape, bytes < AH_RECORD_WORDS ? bytes : AH_RECORD_WORDS);

    at = put_site(record, at, site, strlen(site));
    at = put_separator(record, at);
    record->length = (uint32_t)put(record, at, refused, strlen(refused));
}

static size_t put_number(struct ah_record *record, size_t at, uint64_t number)
{
    char digits[20];
    size_t first = sizeof digits;

    do {
        digits[--first] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    return put(record, at, digits + first, sizeof digits - first);
}

void ah_record_quote(struct ah_record *record, const struct ah_entry *note)
{
    uint32_t known = note->dims < AH_ENTRY_DIMS ? note->dims : AH_ENTRY_DIMS;
    size_t at = 0;

    if (note->dtype[0] != '\0') { /* a call with a tensor */
        at = put(record, at, "[", 1);
        for (uint32_t dim = 0; dim < known; dim++)
            at = put_number(record, dim == 0 ? at : put(record, at, ", ", 2), note->shape[dim]);
        at = known < note->dims ? put(record, at, ", ...]", 6) : put(record, at, "]", 1);
    }
    at = put_site(record, at, note->site, strnlen(note->site, sizeof note->site));
    record->length = (uint32_t)put_separator(record, at);
}

enum ah_likeness ah_records_compare(const struct ah_sheet *sheets, uint32_t ranks, uint32_t rank)
{
    const struct ah_record *mine = &sheets[rank].record;
    uint32_t alike = 1, flags = mine->flags;

    for (uint32_t each = 0; each < ranks; each++) {
        alike &= memcmp(&sheets[each].record, mine, offsetof(struct ah_record, length)) == 0;
        flags |= sheets[each].record.flags;
    }
    if (alike && !(flags & AH_UNEVEN))
        return AH_ALIKE;
    for (uint32_t each = 0; each < ranks; each++) {
        const struct ah_record *theirs = &sheets[each].record;

        if (theirs->sequence != mine->sequence || theirs->kind != mine->kind || theirs->reduction != mine->reduction ||
            theirs->dtype != mine->dtype || theirs->root != mine->root ||
            ((theirs->flags ^ mine->flags) & AH_REFUSED) != 0 || (!(flags & AH_UNEVEN) && theirs->bytes != mine->bytes))
            return AH_UNLIKE;
    }
    return flags & AH_UNEVEN ? AH_ALIKE_BUT_SIZES : AH_ALIKE;
}
