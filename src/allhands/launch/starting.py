"""Starting the workers of one attempt, and what each of them is given: environment, input, output, a port.

Imports nothing that is slow: the first workers are started before all that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable

from ..environments.world import Address
from .job import Job
from .process import Process
from .variables import mark, variables

__all__ = ["keep_port", "open_pipe", "start"]

# What a pipe may hold; the most that Linux gives to ordinary users. A worker goes on while we write.
_PIPE_BYTES = 1 << 20


def start(
    job: Job,
    number: int,
    into: list[Process],
    *,
    name: str,
    token: str,
    master: Address,
    address: str,
    opened: Callable[[int], tuple[int, int]],
) -> int | None:
    """Start every worker of this node in the attempt ``number``, each into the list ``into`` as soon as it runs.

    ``opened`` returns what a worker has as stdout and stderr. Returns where to write what is typed for rank 0, None
    where its standard input is not read here.
    """
    typed: int | None = None
    for local_rank in range(job.local_world_size):
        environment = variables(
            job,
            local_rank,
            number,
            coordinator=mark(name)[1],
            token=token,
            master=master,
            address=address,
            environment=os.environ,
        )
        stdout, stderr = opened(local_rank)
        stdin = None
        try:
            if job.rank(local_rank) == 0:
                stdin, typed = _standard_input()
            else:
                stdin = os.open(os.devnull, os.O_RDONLY)
            into.append(Process(job, local_rank, environment, stdin=stdin, stdout=stdout, stderr=stderr))
        finally:
            # 0 is our own, which rank 0 may share.
            for descriptor in (stdin, stdout, stderr):
                if descriptor:
                    os.close(descriptor)
    return typed


def _standard_input() -> tuple[int, int | None]:
    """Return what rank 0 is to have, and our end where it is a terminal: a pipe or a file is rank 0's own."""
    try:
        os.fstat(0)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY), None
    if not os.isatty(0):
        return 0, None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return reader, writer


def open_pipe() -> tuple[int, int]:
    """Make the pipe of one of a worker's streams; return the agent's end, which never waits, and the worker's."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(OSError):  # fewer pages are allowed to this user: then it is a smaller pipe
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def keep_port(host: str) -> socket.socket:
    """Return a socket that keeps a free port of ``host`` from others; as it does not listen, rank 0 still can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kept = socket.socket(family)
    with contextlib.ExitStack() as stack:
        stack.callback(kept.close)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, 0))
        stack.pop_all()
    return kept
