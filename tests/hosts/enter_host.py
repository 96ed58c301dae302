"""How a rank moves to another host: into its network, with its name and its /etc/hosts. Imported by a rank only."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from pathlib import Path

__all__ = ["enter", "lay"]

# <linux/sched.h> and <sys/mount.h>; the standard library has them from 3.12 on.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def enter() -> None:
    """Move this process to the host that the environment variable HOST names."""
    namespace, name, hosts_file = json.loads(os.environ["HOST"])
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / namespace).open() as place:
        _check(libc.setns(place.fileno(), CLONE_NEWNET))
    _check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
    # First of all: what is mounted here must not appear on the real machine.
    _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    lay(hosts_file, "/etc/hosts")
    socket.sethostname(name)


def lay(file: str, over: str) -> None:
    """Let this host, and only it, see ``file`` in the place of ``over``; call it after `enter`."""
    _check(ctypes.CDLL(None, use_errno=True).mount(file.encode(), over.encode(), None, MS_BIND, None))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
