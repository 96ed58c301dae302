"""`NodeRole`: the decisions about the whole job that this node makes or receives."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..environments.world import Address
from .attempt import Attempt, NodeReport
from .options import Job
from .start import reserve_port
from .verdict import AttemptResult, NodeLoss, judge, result, should_restart

if TYPE_CHECKING:
    from .coordinator_host import CoordinatorHost

__all__ = ["NodeRole"]


class NodeRole:
    """The role of the only node of a job. `Leader` and `Follower` override it for jobs on several nodes."""

    def __init__(self, job: Job, *, token: str, address: str = "", port: socket.socket | None = None) -> None:
        """``port`` reserves the port of the first attempt, whose workers have it in their environment."""
        # With this node's rank and all nodes' world sizes, once the agents have met.
        self.job = job
        # The token of the ranks' roll call.
        self.token = token
        # The address by which other nodes reach this one; "" where there are none.
        self.address = address
        # MASTER_ADDR and MASTER_PORT of this attempt.
        self.master = job.master or Address(address or "127.0.0.1", 0)
        # The number of the current attempt, from 0; a node that joins after a restart begins with a higher one.
        self.number = 0
        # The current attempt, to which requests of other nodes apply.
        self.attempt: Attempt | None = None
        # Prints a line on the terminal.
        self.message: Callable[[str], None] = lambda _: None
        # The signal by which a user or scheduler ended the job, and the node that received it.
        self._stopped, self._stopped_by = 0, ""
        self._losses: list[NodeLoss] = []
        # Called whenever a coordinator was opened.
        self._coordinator_opened: Callable[[], None] = lambda: None
        self._port = port
        self._host: CoordinatorHost | None = None

    async def begin(self, number: int) -> AttemptResult | None:
        """Wait until the attempt ``number`` may start; a result where there will be none."""
        self.number = number
        if self.job.master is None:
            # For torch's own store on rank 0.
            self._port = self._port or reserve_port(self.address or "127.0.0.1")
            host = self.job.coordinator.host if self.job.coordinator is not None else "127.0.0.1"
            self.master = Address(host, self._port.getsockname()[1])
        return None

    async def serve(self, socket_name: str) -> None:
        """Accept the ranks' connections to the coordinator at a Unix socket. Called when the workers were started."""
        # Slow to import; the workers' interpreters start meanwhile.
        from .coordinator_host import CoordinatorHost

        self._host = CoordinatorHost(socket_name, self.token.encode(), self._coordinator_opened)
        await self._host.start()

    def worker_failed(self) -> None:
        """Report that a worker of this node failed."""

    def stall_changed(self, *, stalled: bool, in_collective: bool) -> None:
        """Report whether this node's workers make no progress, and whether one is in a collective meanwhile."""
        if stalled and in_collective and self.attempt is not None:
            self.attempt.end_stalled()

    def stop(self, number: int) -> int:
        """Report that this node received a signal to end; return how often its workers are to be stopped now."""
        self._stopped = self._stopped or number
        return 1

    async def settle(self, report: NodeReport) -> AttemptResult:
        """Report that this node's workers are gone; return the result of the attempt on all nodes."""
        host = self._host
        # The coordinator's findings are complete once it is closed.
        await self._close_attempt()
        verdict = judge(
            report.outcomes,
            [] if host is None else host.findings,
            report.stall,
            self._stopped,
            stopped_by=self._stopped_by,
            lost=self._losses,
        )
        restart = should_restart(self.job, verdict, self.number, stopped=bool(self._stopped))
        return result(self.job, self.number, verdict, report.outcomes, report.leftovers, restart=restart)

    async def _close_attempt(self) -> None:
        """Close the coordinator and free the port."""
        if self._host is not None:
            host, self._host = self._host, None
            await host.close()
        if self._port is not None:
            self._port.close()
            self._port = None

    async def close(self) -> None:
        """Close every connection."""
        await self._close_attempt()
