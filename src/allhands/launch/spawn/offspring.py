"""One process of `allhands.spawn` as its parent sees it: what it was given, how it ended, what it left."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess

from ...errors import AllhandsError, fail
from ..exit_evidence import Evidence
from .child import Descriptor, Order

__all__ = ["Offspring"]

# How long the fork server may take to tell the status of a process whose end was seen.
_STATUS_S = 5.0
_LOOK_S = 0.002


class Offspring(Evidence):
    """A rank's evidence, in memory that belongs to the parent, and its process once it is started."""

    def __init__(self, rank: int, job: str) -> None:
        self.name = f"{job}-record"
        super().__init__(rank, self.name)
        self.pidfd = -1
        self._process: BaseProcess | None = None
        self._parcel = os.memfd_create("allhands-parcel", os.MFD_CLOEXEC)

    def order(
        self, *, parent: int, direct: bool, results: bool, environment: Mapping[str, str], dropped: tuple[str, ...]
    ) -> Order:
        """Return what the process is to be told."""
        return Order(
            rank=self.rank,
            parent=parent,
            direct=direct,
            results=results,
            environment=environment,
            dropped=dropped,
            record=Descriptor(self._record),
            fatal=Descriptor(self._fatal),
            board=Descriptor(self.board),
            parcel=Descriptor(self._parcel),
        )

    def started(self, process: BaseProcess) -> None:
        """Note the process. Its pidfd tells its end; multiprocessing's own sentinel is also held by its children."""
        self._process, self.pid = process, process.pid or 0
        self.started_s = time.monotonic()
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it was started and its end has not been seen yet."""
        return self._process is not None and self.status is None

    @staticmethod
    def wait(pidfds: list[int], timeout_s: float | None) -> list[int]:
        """Wait until one of the processes ends; return those that have."""
        poller = select.poll()
        for pidfd in pidfds:
            poller.register(pidfd, select.POLLIN)
        return [pidfd for pidfd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]

    def reap(self) -> None:
        """Note its end, waiting for it."""
        if self._process is None or self.status is not None:
            return
        self.wait([self.pidfd], None)
        self.ended_s = time.monotonic()
        # Not join with a timeout: that waits for everyone who was forked from it.
        while self._process.exitcode is None and time.monotonic() < self.ended_s + _STATUS_S:
            time.sleep(_LOOK_S)
        self.status = self._process.exitcode
        if self.status is None:
            # Someone else has taken it (a handler of SIGCHLD); its own word is left.
            self.status = 0 if self.record().get("end") == "done" else 1
        else:
            self._process.join()

    def send(self, number: int) -> None:
        """Send it a signal that is to end it, unless it is ending; SIGKILL in any case."""
        if not self.alive or (number != signal.SIGKILL and "end" in self.record()):
            return
        if not self.sent:
            self.sent, self.sent_s = number, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    # Evidence ----------------------------------------------------------------------------------------------

    def parcel(self) -> object:
        """Return what it put into its parcel, None where that cannot be had: an exception is then words alone."""
        try:
            return self._open()
        except Exception:  # noqa: BLE001  # whatever a class of the user's does when it is unpickled
            return None

    def returned(self) -> object:
        """Return what the function returned; raise ArgumentError, naming the rank, where that cannot be had."""
        ended = self.record().get("end")
        if ended == "done" and not os.fstat(self._parcel).st_size:
            return None  # It called sys.exit().
        if ended != "done":
            raise self._no_result("the process ended with status 0 before the function returned: os._exit")
        try:
            return self._open()
        except Exception as problem:
            raise self._no_result(f"{type(problem).__name__}: {problem}") from problem

    def _no_result(self, why: str) -> AllhandsError:
        return fail(
            "invalid-argument",
            f"there is no result of rank {self.rank}",
            who=f"rank {self.rank} (pid {self.pid})",
            why=why,
            fix="return what both processes can import, from the end of the function",
            ranks=(self.rank,),
        )

    def _open(self) -> object:
        os.lseek(self._parcel, 0, os.SEEK_SET)
        with open(self._parcel, "rb", closefd=False) as file:
            return pickle.load(file)  # noqa: S301  # written by our own child into memory that nobody else has

    def close(self) -> None:
        """Free the descriptors; nothing can be read any more."""
        for name in ("pidfd", "board", "_record", "_fatal", "_parcel"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
