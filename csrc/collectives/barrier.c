#include "collectives/collective.h"

int ah_barrier(struct ah_group *group, int64_t timeout_ns)
{
    const struct ah_call call = {.kind = AH_BARRIER, .root = -1};

    return ah_compare_only(group, &call, timeout_ns);
}
