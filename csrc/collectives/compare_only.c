#include "shm/fingerprint.h"
#include "collectives/collective.h"

int ah_compare_only(struct ah_group *group, const struct ah_call *call, int64_t timeout_ns)
{
    int code = ah_call_begin(group, call, 0, 0, timeout_ns);

    if (code != AH_OK)
        return code;
    ah_call_publish(group);
    if ((code = ah_call_compare_all(group)) == AH_OK)
        ah_call_end(group);
    return code;
}
