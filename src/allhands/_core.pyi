"""The C core (`csrc/`), built on Linux only: what Python's own library does not offer. It writes no sentences."""

def set_parent_death_signal(signal: int, /) -> int:
    """Ask the kernel to send ``signal`` to this process when its parent ends (0: no longer ask).

    Returns 0 or an errno. Two traps. "The parent" is the thread that started this process: it must live as
    long as the parent process does. And a parent that ended before this call is not noticed: compare
    ``os.getppid()`` with the parent's pid afterwards.
    """

def peer_credentials(fd: int, /) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end of the connected Unix socket ``fd``.

    They are those of the moment when it connected (or listened, or called socketpair), vouched for by the
    kernel. A pid of 0 means that the peer is in a pid namespace that cannot be seen from here. Raises OSError.
    """
