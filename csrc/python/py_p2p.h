/* Messages for callers that hold the GIL. */
#ifndef ALLHANDS_PY_P2P_H
#define ALLHANDS_PY_P2P_H

#include "python/object.h"

#include "p2p/matching.h"

/* Send or receive and wait for completion. The GIL is released if the message is not complete at once. */
struct ah_outcome ah_send_or_receive(struct ah_p2p *p2p, const struct ah_message *message, int64_t limit_ns);

#endif
