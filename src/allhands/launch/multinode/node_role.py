"""The nodes of a job as one agent sees them: who starts and judges an attempt. Here: a node that is alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...environments.world import Address
from .. import verdict_text
from ..job import Job
from ..starting import keep_port
from ..verdict import Verdict, judge
from .nodes import again

if TYPE_CHECKING:
    from ..attempt import Attempt, Story
    from ..coordinator_host import Hosting

__all__ = ["Alone", "Company", "End", "last_words", "report"]


class End(msgspec.Struct, frozen=True):
    """What came of an attempt: the exit status, the last words on the screen, the text for --report."""

    exit_code: int
    words: str
    report: str
    again: bool = False


class Company(Protocol):
    """What an agent and its attempt need to know of other nodes, and tell them."""

    # With the node's number and everyone's ranks, once the agents have met.
    job: Job
    # By which other nodes reach this one; "" where there are none.
    address: str
    # What MASTER_ADDR and MASTER_PORT say in this attempt.
    master: Address
    # The workers' token.
    token: str
    # Which attempt is under way, from 0: also on a node that joined the job after the first.
    number: int
    # The attempt that is under way; orders of other nodes go to it.
    attempt: Attempt | None
    # Says a line to people.
    say: Callable[[str], None]

    async def begin(self, number: int) -> End | None:
        """Wait until the attempt ``number`` may start; an End where there will be none."""

    async def host(self, name: str) -> None:
        """Let the ranks' groups meet at the Unix socket ``name``; the workers are being started."""

    def failing(self) -> None:
        """A worker of this node failed."""

    def still(self, *, still: bool, inside: bool) -> None:
        """Whether this node's workers stand still, and whether one is inside a collective all the while."""

    def stop(self, number: int) -> int:
        """Someone asked this node for the end; return how many times its workers are to be told so."""

    async def settle(self, story: Story) -> End:
        """This node's workers are gone; return what is to be done, once that is known of all nodes."""

    async def close(self) -> None:
        """End every connection."""


class Alone:
    """One node: every decision is this agent's own."""

    def __init__(self, job: Job, token: str, port: socket.socket | None = None) -> None:
        """``port`` keeps the port of the first attempt, whose workers know it already."""
        self.job, self.token, self.address = job, token, ""
        self.master = job.master or Address("127.0.0.1", 0)
        self.attempt: Attempt | None = None
        self.say: Callable[[str], None] = lambda _: None
        self.number = 0
        self._stopped = False
        self._port = port
        self._hosting: Hosting | None = None

    async def begin(self, number: int) -> End | None:
        """Choose a port for torch's own store."""
        self.number = number
        if self.job.master is None:
            self._port = self._port or keep_port("127.0.0.1")
            self.master = Address("127.0.0.1", self._port.getsockname()[1])
        return None

    async def host(self, name: str) -> None:
        """Start the coordinator in this process."""
        # After the workers, whose interpreters start meanwhile: the control plane takes a while to import.
        from ..coordinator_host import Hosting

        self._hosting = Hosting(name, self.token.encode())
        await self._hosting.start()

    def failing(self) -> None:
        """Nobody else need know."""

    def still(self, *, still: bool, inside: bool) -> None:
        """Declare a hang where both are true."""
        if still and inside and self.attempt is not None:
            self.attempt.inquire()

    def stop(self, number: int) -> int:  # noqa: ARG002  # the others' signature
        """Tell the workers once for each time that someone asked."""
        self._stopped = True
        return 1

    async def settle(self, story: Story) -> End:
        """Judge the attempt."""
        hosting = self._hosting
        await self.close()
        # What the coordinator found is whole once it is closed.
        findings = [] if hosting is None else hosting.findings
        verdict = judge(story.outcomes, findings, story.hanging, story.stopped)
        repeat = again(self.job, verdict, self.number, stopped=self._stopped)
        return End(
            exit_code=0 if verdict is None else verdict.exit_code,
            words=last_words(verdict, story),
            report=report(self.job, self.number, verdict, story),
            again=repeat,
        )

    async def close(self) -> None:
        """End the coordinator and free the port."""
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._hosting is not None:
            hosting, self._hosting = self._hosting, None
            await hosting.close()


def last_words(verdict: Verdict | None, story: Story) -> str:
    """Return what the screen of the agent that judged ends with."""
    if verdict is not None:
        return verdict_text.words(verdict, story.leftovers)
    if story.leftovers:
        return "allhands: ended what the ranks had left behind: " + "; ".join(story.leftovers) + "\n"
    return ""


def report(job: Job, number: int, verdict: Verdict | None, story: Story) -> str:
    """Return the text of --report."""
    return json.dumps(verdict_text.report(job, number, verdict, story.outcomes, story.leftovers), indent=2) + "\n"
