#define _GNU_SOURCE
#include "mpi/wall.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

static struct ah_pin *pin_of(const struct ah_wall *wall, uint32_t rank, uint64_t sequence)
{
    return &wall->pins[2 * (size_t)rank + sequence % 2];
}

size_t ah_wall_bytes(uint32_t ranks)
{
    return 2 * (size_t)ranks * sizeof(struct ah_pin);
}

int ah_wall_open(struct ah_wall *wall, int fd, uint32_t ranks)
{
    struct stat about;
    void *memory;

    if (fstat(fd, &about) != 0)
        return -1;
    if ((size_t)about.st_size < ah_wall_bytes(ranks)) {
        errno = EINVAL; /* a look beyond its end would be a signal */
        return -1;
    }
    memory = mmap(NULL, ah_wall_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return -1;
    *wall = (struct ah_wall){.pins = memory, .ranks = ranks};
    return 0;
}

void ah_wall_close(struct ah_wall *wall)
{
    if (wall->pins)
        munmap(wall->pins, ah_wall_bytes(wall->ranks));
    wall->pins = NULL;
}

void ah_wall_tell(struct ah_wall *wall, uint32_t rank, uint64_t sequence, const struct ah_sheet *sheet, size_t bytes)
{
    struct ah_pin *pin = pin_of(wall, rank, sequence);

    memcpy(&pin->sheet, sheet, bytes);
    pin->bytes = (uint32_t)bytes;
    atomic_store_explicit(&pin->stamp, sequence, memory_order_release);
}

int ah_wall_hear(const struct ah_wall *wall, uint32_t rank, uint64_t sequence, struct ah_sheet *sheet)
{
    struct ah_pin *pin = pin_of(wall, rank, sequence);

    if (atomic_load_explicit(&pin->stamp, memory_order_acquire) != sequence)
        return 0;
    memcpy(sheet, &pin->sheet, pin->bytes <= sizeof *sheet ? pin->bytes : sizeof *sheet);
    return 1;
}
