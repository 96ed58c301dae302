/* struct ucred is a GNU extension of <sys/socket.h>. */
#define _GNU_SOURCE

#include "python/process.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/socket.h>

int ah_set_parent_death_signal(int signal)
{
    /* prctl reads its argument as unsigned long, so a negative number would become a huge one. */
    if (signal < 0)
        return EINVAL;
    return prctl(PR_SET_PDEATHSIG, (unsigned long)signal, 0UL, 0UL, 0UL) == 0 ? 0 : errno;
}

int ah_adopt_orphans(void)
{
    return prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0UL, 0UL, 0UL) == 0 ? 0 : errno;
}

int ah_peer_credentials(int fd, struct ah_credentials *peer)
{
    struct ucred found;
    socklen_t size = sizeof found;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &found, &size) != 0)
        return errno;
    /* A socket that is not a Unix socket, or that has no peer, answers with pid 0 and all-ones ids. */
    if (found.uid == (uid_t)-1)
        return ENOTCONN;
    peer->pid = found.pid;
    peer->uid = found.uid;
    peer->gid = found.gid;
    return 0;
}
