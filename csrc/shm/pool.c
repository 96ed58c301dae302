#define _GNU_SOURCE
#include "shm/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shm/tensor_list.h"

#define LINE ((size_t)64)

/* What is known of a page: whether there is one, here or swapped out, and whether it is the file's. */
#define PAGE_THERE (UINT64_C(3) << 62)
#define PAGE_OF_FILE (UINT64_C(1) << 61)

/* Pages that are asked for at a time. */
#define SOME_PAGES 512

/* Of each rank, in shared memory. */
struct card {
    _Atomic uint64_t call; /* one more than the number of the last call whose results may go to the pool */
    unsigned char rest[LINE - sizeof(uint64_t)];
};

static struct card *card_of(const struct ah_pool *pool, uint32_t rank)
{
    return (struct card *)(void *)pool->memory + rank;
}

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t rounded(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Where the results begin: on a page of their own. */
static size_t begin_of(uint32_t ranks)
{
    return rounded(ranks * sizeof(struct card), page_bytes());
}

size_t ah_pool_bytes(const size_t *sizes, size_t number, uint32_t ranks)
{
    size_t bytes = 0;

    for (size_t index = 0; index < number; index++)
        bytes += rounded(sizes[index], LINE);
    return begin_of(ranks) + rounded(bytes, page_bytes());
}

/* Where each result goes in the memory of all ranks. */
static int lay_out(struct ah_pool *pool, const size_t *sizes, size_t number)
{
    size_t at = pool->at;

    if (ah_bundle_make(&pool->into, number) != 0)
        return ENOMEM;
    for (size_t index = 0; index < number; index++) {
        pool->into.parts[index] = (struct ah_part){.data = pool->memory + at, .bytes = sizes[index]};
        at += rounded(sizes[index], LINE);
    }
    ah_bundle_count(&pool->into);
    return 0;
}

int ah_pool_make(struct ah_pool *pool, int fd, const size_t *sizes, size_t number, uint32_t rank, uint32_t ranks)
{
    int code;

    *pool = (struct ah_pool){.rank = rank, .ranks = ranks, .pages = -1, .at = begin_of(ranks)};
    pool->bytes = ah_pool_bytes(sizes, number, ranks);
    if (number == 0 || sizes[number - 1] > sizeof pool->cell)
        return EINVAL;
    if (!(pool->view = calloc(1, sizeof *pool->view)))
        return ENOMEM;
    pool->view->holders = 1;
    pool->view->bytes = pool->bytes - pool->at;
    pool->memory = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pool->view->memory = mmap(NULL, pool->view->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, (off_t)pool->at);
    pool->pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pool->memory == MAP_FAILED || pool->view->memory == MAP_FAILED || pool->pages < 0)
        code = errno ? errno : ENOSYS;
    else
        code = lay_out(pool, sizes, number);
    if (code != 0)
        ah_pool_free(pool);
    return code;
}

void ah_pool_hold(struct ah_pool_view *view)
{
    atomic_fetch_add_explicit(&view->holders, 1, memory_order_relaxed);
}

void ah_pool_release(struct ah_pool_view *view)
{
    if (atomic_fetch_sub_explicit(&view->holders, 1, memory_order_acq_rel) != 1)
        return;
    if (view->memory && view->memory != MAP_FAILED)
        munmap(view->memory, view->bytes);
    free(view->attached);
    free(view);
}

void ah_pool_free(struct ah_pool *pool)
{
    if (pool->memory && pool->memory != MAP_FAILED)
        munmap(pool->memory, pool->bytes);
    if (pool->view)
        ah_pool_release(pool->view);
    if (pool->pages >= 0)
        close(pool->pages);
    ah_bundle_free(&pool->into);
    pool->memory = NULL;
    pool->view = NULL;
    pool->pages = -1;
}

int ah_pool_fits(const struct ah_pool *pool, const struct ah_bundle *bundle)
{
    int fits = bundle->number == pool->into.number && bundle->parts[bundle->number - 1].data == (const unsigned char *)pool->cell;

    for (size_t index = 0; fits && index < bundle->number; index++)
        fits = bundle->parts[index].bytes == pool->into.parts[index].bytes;
    return fits;
}

unsigned char *ah_pool_result(const struct ah_pool *pool, size_t index)
{
    return pool->view->memory + (pool->into.parts[index].data - (pool->memory + pool->at));
}

int ah_pool_is_free(const struct ah_pool *pool)
{
    return atomic_load_explicit(&pool->view->holders, memory_order_acquire) == 1;
}

int ah_pool_is_clean(const struct ah_pool *pool)
{
    size_t page = page_bytes(), pages = pool->view->bytes / page;
    uint64_t found[SOME_PAGES], mine = 0;

    for (size_t at = 0, some; at < pages && !mine; at += some) {
        off_t place = (off_t)(((uintptr_t)pool->view->memory / page + at) * sizeof *found);
        ssize_t bytes;

        some = ah_min(SOME_PAGES, pages - at);
        bytes = pread(pool->pages, found, some * sizeof *found, place);
        if (bytes != (ssize_t)(some * sizeof *found))
            return -1;
        for (size_t each = 0; each < some; each++)
            mine |= (found[each] & PAGE_THERE) && !(found[each] & PAGE_OF_FILE);
    }
    if (mine && madvise(pool->view->memory, pool->view->bytes, MADV_DONTNEED) != 0)
        return -1;
    return !mine;
}

void ah_pool_announce(struct ah_pool *pool, uint64_t sequence)
{
    pool->filled = 0;
    if (pool->offered)
        atomic_store_explicit(&card_of(pool, pool->rank)->call, sequence + 1, memory_order_release);
    pool->offered = 0;
}

int ah_pool_agreed(const struct ah_pool *pool, uint64_t sequence)
{
    int agreed = 1;

    for (uint32_t rank = 0; rank < pool->ranks; rank++)
        agreed = agreed && atomic_load_explicit(&card_of(pool, rank)->call, memory_order_acquire) == sequence + 1;
    return agreed;
}
