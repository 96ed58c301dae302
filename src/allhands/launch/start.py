"""What an agent does before it imports anything slow: it starts its guard and, on one node, the workers.

Their interpreters start and import torch while the agent imports asyncio and the control plane, which nobody needs
before. Imports nothing that is slow itself.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Sequence
from types import FrameType

from .. import settings
from .._core import adopt_orphans
from ..environments.world import Address
from .job import Job
from .options import Unusable, make, plain
from .process import Process
from .starting import keep_port, open_pipe, start
from .variables import mark
from .watchdog import Guard

__all__ = ["ENDING", "HELD", "Ahead", "run"]

# Descriptors that a worker costs the agent: two pipes, four memfds, two logs, a connection and its pidfd.
_PER_WORKER = 12

# The signals that ask for the end of the job; and all that the agent answers in its event loop.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HELD = (*ENDING, signal.SIGUSR1, signal.SIGTSTP)


def run(line: Sequence[str]) -> int | None:
    """Run the job that the words after `allhands run` ask for; None where click has to read them."""
    found = plain(line, os.environ)
    if found is None:
        return None
    try:
        job = make(*found)
    except Unusable:
        return None  # click says so, with the usage.
    ahead = Ahead(job)
    try:
        from .agent import main
    except BaseException:
        ahead.close()
        raise
    return main(job, ahead)


class Ahead:
    """The agent's place and guard, the signals that came early, and the first workers where they run already."""

    def __init__(self, job: Job) -> None:
        # Where the workers find the coordinator, which marks every process of the job on this node.
        self.name = f"allhands-{os.urandom(8).hex()}"
        self.token = settings.read().token or os.urandom(16).hex()
        # On one node: keeps the port that MASTER_PORT names, where the user named none.
        self.port: socket.socket | None = None
        self.processes: list[Process] = []
        # The agent's ends of stdout and stderr, in pairs, by local rank.
        self.readers: list[tuple[int, int]] = []
        # Where to write what is typed for rank 0.
        self.typed: int | None = None
        self.early: list[int] = []
        _raise_descriptor_limit(job)
        # A shell that became this process may have left us its children, which are not the job's.
        strangers = _descendants()
        adopt_orphans()
        self._hold_signals()
        self.guard = Guard(*mark(self.name))
        self.spared = {self.guard.pid, *strangers}
        try:
            # Agents of several nodes meet first. Log files may have no room, which is said before anything is started.
            if job.nodes == 1 and not any(map(any, job.streams)):
                self._start(job)
        except BaseException:
            self.close()
            raise

    def _hold_signals(self) -> None:
        """Keep what comes before there is an event loop to answer it."""
        for number in HELD:
            # nohup and shells that start us in the background ask for it to be ignored.
            if number not in ENDING or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hold)

    def _hold(self, number: int, _: FrameType | None) -> None:
        self.early.append(number)

    def _start(self, job: Job) -> None:
        master = job.master
        if master is None:
            self.port = keep_port("127.0.0.1")
            master = Address("127.0.0.1", self.port.getsockname()[1])
        self.typed = start(
            job,
            0,
            self.processes,
            name=self.name,
            token=self.token,
            master=master,
            address="",
            opened=self._opened,
        )

    def _opened(self, _: int) -> tuple[int, int]:
        stdout, stderr = open_pipe(), open_pipe()
        self.readers.append((stdout[0], stderr[0]))
        return stdout[1], stderr[1]

    def close(self) -> None:
        """Let the guard go; kill workers that still run, after a start that failed."""
        for process in self.processes:
            if process.alive:
                process.tell(signal.SIGKILL)
        self.guard.dismiss()


def _descendants() -> list[int]:
    try:
        # One file where the kernel keeps it; all of /proc takes as long as starting a worker.
        with open("/proc/thread-self/children", "rb") as file:  # noqa: PTH123  # pathlib is not imported for this
            if not file.read():
                return []
    except OSError:
        pass
    from .process_tree import descendants

    return descendants(os.getpid())


def _raise_descriptor_limit(job: Job) -> None:
    need = _PER_WORKER * job.local_world_size + 2 * job.world_size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        from ..errors import fail

        raise fail(
            "fd-limit",
            f"too few file descriptors for {job.local_world_size} ranks on this node",
            who=f"the launcher (pid {os.getpid()})",
            why=f"it needs {need}, the limit is {hard}",
            fix="raise the limit before the job starts: ulimit -n 65536 (and LimitNOFILE= in a service)",
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
