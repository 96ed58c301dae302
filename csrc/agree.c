#include "collective.h"
#include "wait.h"

int ah_agree(struct ah_group *group, const struct ah_call *call, int64_t timeout_ns)
{
    uint32_t ticket = group->ticket;
    int code = ah_begin(group, call, timeout_ns);

    if (code != AH_OK)
        return code;
    ah_post(group, AH_ARRIVED, ticket + 1);
    if ((code = ah_meet(group)) == AH_OK)
        ah_finish(group, ticket + 1);
    return code;
}
