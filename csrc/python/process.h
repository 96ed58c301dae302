/* What a process can ask the kernel about its parent and its peers. Plain C: knows nothing of Python. */
#ifndef ALLHANDS_PROCESS_H
#define ALLHANDS_PROCESS_H

#include <sys/types.h>

struct ah_credentials {
    pid_t pid;
    uid_t uid;
    gid_t gid;
};

/* Have the kernel send `signal` to this process when the thread that started it ends; 0 turns it off.
 * Returns 0 or an errno. */
int ah_set_parent_death_signal(int signal);

/* Have the kernel hand this process the orphans among its descendants, instead of giving them to init.
 * Returns 0 or an errno. */
int ah_adopt_orphans(void);

/* Fill in who is at the other end of the connected Unix socket `fd`. Returns 0 or an errno. */
int ah_peer_credentials(int fd, struct ah_credentials *peer);

#endif
