#define _GNU_SOURCE
#include "shm/core.h"

#include <sched.h>
#include <string.h>

#include "shm/wait.h"

/* A rank moves no more often than this: it takes 20 to 50 us, and what the others say of themselves is as old as their last chunk.
 * The system itself leaves ranks where they are for 4 ms and more, because each has just run there. */
#define MOVE_EVERY_NS 1000000

/* How many ranks say that they are on `core`. */
static uint32_t ranks_on(const struct ah_group *group, uint32_t core)
{
    uint32_t number = 0;

    for (uint32_t rank = 0; rank < group->ranks; rank++)
        number += atomic_load_explicit(&group->members[rank].core, memory_order_relaxed) == core + 1;
    return number;
}

/* Whether no rank after ours says that it is on `core`: of those who see that they are too many, one goes. */
static int is_last_on(const struct ah_group *group, uint32_t core)
{
    for (uint32_t rank = group->rank + 1; rank < group->ranks; rank++) {
        if (atomic_load_explicit(&group->members[rank].core, memory_order_relaxed) == core + 1)
            return 0;
    }
    return 1;
}

/* Let this thread run on `core` alone, and then where it may: it stays there until the system has a reason to move it. */
static int move_to(uint32_t core, const cpu_set_t *allowed)
{
    cpu_set_t only;

    CPU_ZERO(&only);
    CPU_SET(core, &only);
    if (sched_setaffinity(0, sizeof only, &only) != 0)
        return -1;
    if (sched_setaffinity(0, sizeof *allowed, allowed) == 0)
        return 0;
    /* None of those cores is ours any more: take all that the system gives. */
    memset(&only, 0xff, sizeof only);
    return sched_setaffinity(0, sizeof only, &only);
}

/* Go to the core with the fewest ranks, where that makes the difference smaller. */
static int leave(struct ah_group *group, uint32_t here)
{
    uint32_t crowd = ranks_on(group, here), fewest = crowd, best = here;
    cpu_set_t allowed;

    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return -1;
    for (uint32_t core = 0; core < CPU_SETSIZE && fewest > 0; core++) {
        uint32_t number = CPU_ISSET(core, &allowed) ? ranks_on(group, core) : crowd;

        if (number < fewest) {
            fewest = number;
            best = core;
        }
    }
    if (crowd - fewest < 2)
        return 0;
    if (move_to(best, &allowed) != 0)
        return -1;
    atomic_store_explicit(&group->members[group->rank].core, best + 1, memory_order_relaxed);
    group->moved++;
    return 0;
}

/* Ranks on each core where they are spread evenly; 0 where nobody needs to move, or can. */
static uint32_t fair_share(const struct ah_group *group)
{
    cpu_set_t allowed;
    uint32_t cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? (uint32_t)CPU_COUNT(&allowed) : 0;

    return cores < 2 || cores > group->ranks ? 0 : (group->ranks + cores - 1) / cores;
}

void ah_spread_out(struct ah_group *group)
{
    _Atomic uint32_t *mine = &group->members[group->rank].core;
    int64_t now_ns;
    int core;

    if (!group->knows_share) {
        group->share = fair_share(group);
        group->knows_share = 1;
    }
    if (group->share == 0 || (core = sched_getcpu()) < 0)
        return;
    if (atomic_load_explicit(mine, memory_order_relaxed) != (uint32_t)core + 1)
        atomic_store_explicit(mine, (uint32_t)core + 1, memory_order_relaxed);
    if (ranks_on(group, (uint32_t)core) <= group->share || !is_last_on(group, (uint32_t)core))
        return;
    now_ns = ah_clock_ns();
    if (now_ns - group->moved_ns < MOVE_EVERY_NS)
        return;
    group->moved_ns = now_ns;
    /* Where the system forbids it, it is not asked again. */
    if (leave(group, (uint32_t)core) != 0)
        group->share = 0;
}
