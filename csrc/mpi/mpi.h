/* The MPI library of this process, known by the addresses of its functions: no header of it is needed, and none fits
 * both families. A handle is a pointer to Open MPI (openmpi.c) and a number to MPICH (mpich.c); both files are family.h
 * with their own types. Every function returns 0, or the library's own error. */
#ifndef ALLHANDS_MPI_H
#define ALLHANDS_MPI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Which functions, in the order in which their addresses are given. */
enum ah_mpi_call {
    AH_MPI_ISEND,
    AH_MPI_IRECV,
    AH_MPI_SEND_INIT,
    AH_MPI_RECV_INIT,
    AH_MPI_STARTALL,
    AH_MPI_TESTALL,
    AH_MPI_CANCEL,
    AH_MPI_REQUEST_FREE,
    AH_MPI_IALLGATHER,
    AH_MPI_IBCAST,
    AH_MPI_ERROR_STRING,
    AH_MPI_CALLS,
};

/* As much as both families say of an error. */
#define AH_MPI_WORDS 1024

/* A communicator and the type of a byte, as the library's own handles are numbered. */
struct ah_mpi_comm {
    uintptr_t comm, byte;
};

/* Requests in an array, for the functions that take one. Only the family's own file looks at the handles. */
struct ah_requests {
    void *handles;
    uint32_t count, room;
};

struct ah_mpi {
    uintptr_t addresses[AH_MPI_CALLS];
    uintptr_t none; /* MPI_REQUEST_NULL */
    size_t handle_bytes;
    int alone; /* not 0: the library wants one call at a time, those with `lock` held */
    pthread_mutex_t lock;
    /* Begin to send or to receive, to or from `peer`, and add the request; there is room for it. */
    int (*begin)(struct ah_mpi *mpi, struct ah_mpi_comm comm, int sends, void *data, int bytes, int peer, int tag,
                 struct ah_requests *requests);
    /* The same, but only prepare it, for `start`. */
    int (*prepare)(struct ah_mpi *mpi, struct ah_mpi_comm comm, int sends, void *data, int bytes, int peer, int tag,
                   struct ah_requests *requests);
    int (*start)(struct ah_mpi *mpi, struct ah_requests *requests);
    /* Tell whether the first `count` are over; MPI moves data meanwhile. */
    int (*test)(struct ah_mpi *mpi, struct ah_requests *requests, uint32_t count, int *over);
    int (*cancel)(struct ah_mpi *mpi, struct ah_requests *requests, uint32_t index);
    int (*release)(struct ah_mpi *mpi, struct ah_requests *requests);
    /* Begin to give everyone's `mine` to everyone, and the root's `data` to everyone. */
    int (*gather)(struct ah_mpi *mpi, struct ah_mpi_comm comm, const void *mine, void *whole, int bytes,
                  struct ah_requests *requests);
    int (*broadcast)(struct ah_mpi *mpi, struct ah_mpi_comm comm, void *data, int bytes, int root,
                     struct ah_requests *requests);
    /* Put what an error means into `words`, of AH_MPI_WORDS. */
    void (*say)(struct ah_mpi *mpi, int error, char *words);
};

/* Fill in all but `none`, `alone` and `lock`. */
void ah_openmpi(struct ah_mpi *mpi, const uintptr_t addresses[AH_MPI_CALLS]);
void ah_mpich(struct ah_mpi *mpi, const uintptr_t addresses[AH_MPI_CALLS]);

#endif
