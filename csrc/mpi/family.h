/* MPI's functions with the types of one family. Included by its file, which defines COMM, TYPE, REQUEST and STATUS, what
 * it calls no statuses (IGNORE), and how a number that Python was given becomes a handle (AS). No guard: each file that
 * includes this has its own copy, of its own types. */
#include <string.h>

#include "mpi/mpi.h"

typedef int (*isend_call)(const void *, int, TYPE, int, int, COMM, REQUEST *);
typedef int (*irecv_call)(void *, int, TYPE, int, int, COMM, REQUEST *);
typedef int (*startall_call)(int, REQUEST *);
typedef int (*testall_call)(int, REQUEST *, int *, STATUS *);
typedef int (*request_call)(REQUEST *);
typedef int (*iallgather_call)(const void *, int, TYPE, void *, int, TYPE, COMM, REQUEST *);
typedef int (*ibcast_call)(void *, int, TYPE, int, COMM, REQUEST *);
typedef int (*error_string_call)(int, char *, int *);

#define FUNCTION(mpi, type, which) ((type)(mpi)->addresses[which])

/* Do `call` alone where the library wants that, and keep what it returns. */
#define DO(mpi, code, call)                          \
    do {                                             \
        if ((mpi)->alone)                            \
            pthread_mutex_lock(&(mpi)->lock);        \
        (code) = (call);                             \
        if ((mpi)->alone)                            \
            pthread_mutex_unlock(&(mpi)->lock);      \
    } while (0)

static int begin(struct ah_mpi *mpi, struct ah_mpi_comm comm, int sends, void *data, int bytes, int peer, int tag,
                 struct ah_requests *requests)
{
    REQUEST *request = (REQUEST *)requests->handles + requests->count;
    int code;

    if (sends)
        DO(mpi, code,
           FUNCTION(mpi, isend_call, AH_MPI_ISEND)
           (data, bytes, AS(TYPE, comm.byte), peer, tag, AS(COMM, comm.comm), request));
    else
        DO(mpi, code,
           FUNCTION(mpi, irecv_call, AH_MPI_IRECV)
           (data, bytes, AS(TYPE, comm.byte), peer, tag, AS(COMM, comm.comm), request));
    requests->count += code == 0;
    return code;
}

static int prepare(struct ah_mpi *mpi, struct ah_mpi_comm comm, int sends, void *data, int bytes, int peer, int tag,
                   struct ah_requests *requests)
{
    REQUEST *request = (REQUEST *)requests->handles + requests->count;
    int code;

    if (sends)
        DO(mpi, code,
           FUNCTION(mpi, isend_call, AH_MPI_SEND_INIT)
           (data, bytes, AS(TYPE, comm.byte), peer, tag, AS(COMM, comm.comm), request));
    else
        DO(mpi, code,
           FUNCTION(mpi, irecv_call, AH_MPI_RECV_INIT)
           (data, bytes, AS(TYPE, comm.byte), peer, tag, AS(COMM, comm.comm), request));
    requests->count += code == 0;
    return code;
}

static int start(struct ah_mpi *mpi, struct ah_requests *requests)
{
    int code;

    DO(mpi, code, FUNCTION(mpi, startall_call, AH_MPI_STARTALL)((int)requests->count, (REQUEST *)requests->handles));
    return code;
}

static int test(struct ah_mpi *mpi, struct ah_requests *requests, uint32_t count, int *over)
{
    int code;

    DO(mpi, code,
       FUNCTION(mpi, testall_call, AH_MPI_TESTALL)((int)count, (REQUEST *)requests->handles, over, IGNORE));
    return code;
}

static int cancel(struct ah_mpi *mpi, struct ah_requests *requests, uint32_t index)
{
    REQUEST *request = (REQUEST *)requests->handles + index;
    int code = 0;

    /* An error of one ends others of the array. MPI would take cancelling nothing for a mistake of ours. */
    if (*request != AS(REQUEST, mpi->none))
        DO(mpi, code, FUNCTION(mpi, request_call, AH_MPI_CANCEL)(request));
    return code;
}

static int release(struct ah_mpi *mpi, struct ah_requests *requests)
{
    int code = 0;

    while (requests->count > 0 && code == 0) {
        requests->count--;
        DO(mpi, code, FUNCTION(mpi, request_call, AH_MPI_REQUEST_FREE)((REQUEST *)requests->handles + requests->count));
    }
    return code;
}

static int gather(struct ah_mpi *mpi, struct ah_mpi_comm comm, const void *mine, void *whole, int bytes,
                  struct ah_requests *requests)
{
    REQUEST *request = (REQUEST *)requests->handles + requests->count;
    TYPE byte = AS(TYPE, comm.byte);
    int code;

    DO(mpi, code,
       FUNCTION(mpi, iallgather_call, AH_MPI_IALLGATHER)
       (mine, bytes, byte, whole, bytes, byte, AS(COMM, comm.comm), request));
    requests->count += code == 0;
    return code;
}

static int broadcast(struct ah_mpi *mpi, struct ah_mpi_comm comm, void *data, int bytes, int root,
                     struct ah_requests *requests)
{
    REQUEST *request = (REQUEST *)requests->handles + requests->count;
    int code;

    DO(mpi, code,
       FUNCTION(mpi, ibcast_call, AH_MPI_IBCAST)(data, bytes, AS(TYPE, comm.byte), root, AS(COMM, comm.comm), request));
    requests->count += code == 0;
    return code;
}

static void say(struct ah_mpi *mpi, int error, char *words)
{
    int length = 0, code;

    memset(words, 0, AH_MPI_WORDS);
    DO(mpi, code, FUNCTION(mpi, error_string_call, AH_MPI_ERROR_STRING)(error, words, &length));
    if (code != 0)
        words[0] = '\0';
}

static void fill(struct ah_mpi *mpi, const uintptr_t addresses[AH_MPI_CALLS])
{
    memcpy(mpi->addresses, addresses, sizeof mpi->addresses);
    mpi->handle_bytes = sizeof(REQUEST);
    mpi->begin = begin;
    mpi->prepare = prepare;
    mpi->start = start;
    mpi->test = test;
    mpi->cancel = cancel;
    mpi->release = release;
    mpi->gather = gather;
    mpi->broadcast = broadcast;
    mpi->say = say;
}
