/* A wall: shared memory where the ranks of a group over MPI pin up what they call, where all of them are on one host. It
 * takes the place of the messages that carry records, each of which costs what a message of data does.
 *
 * Every call waits for everyone's sheet, so nobody is more than one call ahead of anyone: two places for each rank are
 * enough, in turn. */
#ifndef ALLHANDS_WALL_H
#define ALLHANDS_WALL_H

#include <stdalign.h>
#include <stdatomic.h>

#include "mpi/record.h"
#include "shm/segment.h"

struct ah_pin {
    alignas(AH_ALIGN) _Atomic uint64_t stamp; /* the sequence of the call, once the sheet stands there */
    uint32_t bytes;                          /* of the sheet, from its beginning */
    struct ah_sheet sheet;
};

struct ah_wall {
    struct ah_pin *pins; /* two for each rank; NULL where there is no wall */
    uint32_t ranks;
};

/* Bytes of a wall for `ranks`. */
size_t ah_wall_bytes(uint32_t ranks);

/* Map the wall in `fd`, fresh pages of zeros. Returns 0, or -1 where that cannot be done or it is too small (errno). */
int ah_wall_open(struct ah_wall *wall, int fd, uint32_t ranks);

void ah_wall_close(struct ah_wall *wall);

/* Pin up the first `bytes` of our sheet of call `sequence`, which is not 0. */
void ah_wall_tell(struct ah_wall *wall, uint32_t rank, uint64_t sequence, const struct ah_sheet *sheet, size_t bytes);

/* Read what `rank` pinned up of call `sequence`: 1, or 0 where it has not yet. */
int ah_wall_hear(const struct ah_wall *wall, uint32_t rank, uint64_t sequence, struct ah_sheet *sheet);

#endif
