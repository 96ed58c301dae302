/* MPICH and what shares its binary interface: handles are numbers, all 32 bits of them used. */
#include <stdint.h>

struct MPI_Status;

#define COMM int
#define TYPE int
#define REQUEST int
#define STATUS struct MPI_Status
#define IGNORE ((STATUS *)(uintptr_t)1)
#define AS(type, number) ((type)(uint32_t)(number))

#include "mpi/family.h"

void ah_mpich(struct ah_mpi *mpi, const uintptr_t addresses[AH_MPI_CALLS])
{
    fill(mpi, addresses);
}
