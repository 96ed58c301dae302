/* Open MPI: handles are pointers to its own structures, of which nothing else is known here. */
struct ompi_communicator_t;
struct ompi_datatype_t;
struct ompi_request_t;
struct ompi_status_public_t;

#define COMM struct ompi_communicator_t *
#define TYPE struct ompi_datatype_t *
#define REQUEST struct ompi_request_t *
#define STATUS struct ompi_status_public_t
#define IGNORE ((STATUS *)0)
#define AS(type, number) ((type)(number))

#include "mpi/family.h"

void ah_openmpi(struct ah_mpi *mpi, const uintptr_t addresses[AH_MPI_CALLS])
{
    fill(mpi, addresses);
}
