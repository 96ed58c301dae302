#include "shm/fingerprint.h"
#include "collectives/collective.h"

int ah_agree(struct ah_group *group, const struct ah_call *call, int64_t timeout_ns)
{
    int code = ah_begin(group, call, 0, 0, timeout_ns);

    if (code != AH_OK)
        return code;
    ah_publish(group);
    if ((code = ah_meet(group)) == AH_OK)
        ah_close(group);
    return code;
}
