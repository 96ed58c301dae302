/* One rank's end of a group over MPI: what it has begun, and waiting for it. Every wait has a deadline and looks at the
 * group's end. One call at a time. */
#ifndef ALLHANDS_FERRY_H
#define ALLHANDS_FERRY_H

#include <stdatomic.h>

#include "collectives/collective.h"
#include "mpi/mpi.h"
#include "mpi/record.h"
#include "mpi/wall.h"

struct ah_ferry {
    struct ah_mpi *mpi;
    struct ah_mpi_comm comm;
    uint32_t rank, ranks;
    uint32_t spins; /* how often to look before giving the core away */
    uint32_t burst; /* how often to look each time before giving it away again */
    uint64_t sequence;
    int under_way;    /* not 0 from the beginning of a call to its good end: after a bad one there is no other */
    int left;         /* not 0: MPI may still write to or read from what was given, so nothing is freed */
    int error;        /* what MPI said, 0 for nothing */
    atomic_int over;  /* not 0: the group is over */
    int64_t deadline_ns;
    uint32_t heard;          /* ranks whose record of this call was read from the wall: those below this one */
    struct ah_sheet *sheets; /* everyone's, ours among them */
    struct ah_sheet *mine;   /* ours once more, where MPI's own gathering wants it apart */
    int64_t *tables;         /* for each rank what it gives to and takes from each; NULL unless they were exchanged */
    struct ah_wall wall;        /* where records are pinned up; else they are messages: */
    struct ah_requests records; /* receives of the records of few ranks, prepared once */
    struct ah_requests told;    /* our own record on its way to each of them */
    struct ah_requests coming;  /* data on its way to this rank */
    struct ah_requests going;   /* and from it, or by MPI's own ways: what cannot be taken back */
    unsigned char *space;       /* where others' data may be put */
    size_t space_bytes;
    const void **rows; /* a source for each rank */
    /* Called now and then while waiting; not 0 breaks the call off. */
    int (*check_interrupt)(void *context);
    void *context;
};

/* What a call is: what goes into its record, and what each rank is given and gives. */
struct ah_trip {
    uint32_t kind, reduction, dtype;
    int32_t root;
    size_t bytes;
    size_t with; /* bytes of data that come with the record */
    const struct ah_part *gives, *takes; /* for each rank; NULL where all are of `bytes` */
    uint32_t flags;
};

/* Its wall, where it is to have one, is open already. Returns 0, or -1 where there is no memory or MPI refuses (`error`). */
int ah_ferry_open(struct ah_ferry *ferry);

/* Let go of what MPI has for this group. Frees nothing while something is left in the middle. */
void ah_ferry_close(struct ah_ferry *ferry);

/* Begin a call: tell the others of it. */
int ah_ferry_depart(struct ah_ferry *ferry, const struct ah_trip *trip, int64_t timeout_ns);

/* Begin to send to or receive from a rank. */
int ah_ferry_send(struct ah_ferry *ferry, const void *data, size_t bytes, uint32_t peer);
int ah_ferry_receive(struct ah_ferry *ferry, void *data, size_t bytes, uint32_t peer);

/* Begin MPI's own broadcast. */
int ah_ferry_broadcast(struct ah_ferry *ferry, void *data, size_t bytes, uint32_t root);

/* Wait for what everyone calls and compare it: AH_MISMATCH where it is not one call. */
int ah_ferry_compare(struct ah_ferry *ferry, const struct ah_trip *trip);

/* Wait for all data that is to come, and for the first `count` that went. */
int ah_ferry_finish_coming(struct ah_ferry *ferry);
int ah_ferry_finish_going(struct ah_ferry *ferry, uint32_t count);

/* Wait for all data that was begun. */
int ah_ferry_finish(struct ah_ferry *ferry);

/* End a call. After a bad end what was to come is taken back: nobody waits for it any more. */
int ah_ferry_arrive(struct ah_ferry *ferry, int code);

/* Up to so many ranks without a wall everyone writes to everyone; beyond, MPI's own trees make fewer messages. */
#define AH_FERRY_FEW 8

#endif
