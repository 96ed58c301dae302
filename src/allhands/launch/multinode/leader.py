"""Node 0's agent among the others: it gathers what every node tells, judges for all, and gives the orders."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING

from ...control.messages import Closing
from ...environments.world import Address
from ...errors import error
from .. import verdict_text
from ..coordinator_host import Hosting
from ..ending import EXPLAIN_S
from ..job import Job
from ..starting import keep_port
from ..verdict import judge
from .agent_messages import (
    Begin,
    Data,
    Failing,
    Finish,
    FromConvenor,
    FromDelegate,
    Inquire,
    Opened,
    Over,
    Seated,
    Shut,
    Still,
    Stop,
    Stopping,
    Told,
)
from .joining import Stopped
from .node_loss import PATIENCE_S, SILENT_S, Loss, silence
from .node_role import End, last_words, report
from .nodes import Urging, again, merge, ranks_of, shifted, stands_still
from .seats import Envoy, Seats
from .tunnel import Far

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..attempt import Attempt, Story

__all__ = ["Convenor"]

# How often it is said who is still awaited, among the lines of the ranks.
_SAY_S = 10.0

# How long delegates are given to read the last word before their connections close.
_GOODBYE_S = 1.0


class Convenor:
    """A `company.Company` that decides. Made once the agents' roll call may be answered."""

    def __init__(self, job: Job, seats: Seats, *, address: str, token: str, shared: bool) -> None:
        """``address`` is this node's own; ``shared`` says that every node was given the token already."""
        self.job, self.address, self.token = job, address, token
        self.master = job.master or Address(address, 0)
        self.attempt: Attempt | None = None
        self.say: Callable[[str], None] = lambda _: None
        self._shared = shared
        self._seats = seats
        self._far = Far(self._pass_on)
        self._hosting: Hosting | None = None
        self._port: socket.socket | None = None
        self._hosts: list[str] = []
        self.number = 0
        self._changed = asyncio.Event()
        self._finishing: float | None = None
        self._stories: dict[int, Story] = {}
        self._still: dict[int, tuple[bool, bool]] = {}
        self._losses: list[Loss] = []
        self._urging = Urging({})
        self._stopped, self._by = 0, ""
        self._times = 0
        self._said = 0.0
        seats.on_message, seats.on_lost = self._heard, self._lost

    # The roll call -----------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Wait for the agents of all nodes, or raise why they do not come together."""
        present = self._seats.roll.present
        while True:
            await self._decided()
            if self._stopped:
                raise Stopped(self._stopped, self._by)
            if self._seats.refused is not None:
                # Those who are still starting should be given the same words.
                await self._seats.finished.wait()
                raise error(self._seats.refused)
            if len(present) == self.job.nodes:
                break
            # One was lost in the moment after it came.
            self._seats.reopen(self.job.timeout_s)
        claims = [present[node].claim for node in range(self.job.nodes)]
        self._hosts = [claim.identity.host for claim in claims]
        self.job = self.job._replace(node_rank=0, layout=tuple(claim.local_world_size for claim in claims))
        token = "" if self._shared else self.token
        for node, envoy in self._seats.members.items():
            envoy.order(Seated(node, list(self.job.layout), self._hosts, token))

    async def _decided(self) -> None:
        """Wait until the roll call is over, or someone asked for the end."""
        self._seats.on_change = self._changed.set
        while not self._seats.decided and not self._stopped:
            self._changed.clear()
            await self._changed.wait()

    def _name(self, node: int) -> str:
        arrival = self._seats.roll.present.get(node)
        host = self._hosts[node] if self._hosts else arrival.claim.identity.host if arrival is not None else ""
        return f"node {node} ({host})" if host else f"node {node}"

    # Orders ------------------------------------------------------------------------------------------------

    def _all(self, message: FromConvenor, but: int = -1) -> None:
        for node, envoy in list(self._seats.members.items()):
            if node != but:
                envoy.order(message)

    def _pass_on(self, node: int, message: Data | Shut) -> None:
        envoy = self._seats.members.get(node)
        if envoy is not None:
            envoy.order(message)

    async def begin(self, number: int) -> End | None:
        """Start the attempt on all nodes; where a seat is empty, wait for someone to take it."""
        empty = [node for node in range(self.job.nodes) if node not in self._seats.roll.present]
        if empty:
            # Also one that told its story and was lost after it.
            names = {loss.node: str(loss) for loss in self._losses}
            lost = " and ".join(names.get(node, self._name(node)) for node in empty)
            self.say(f"waiting for {lost}: the job goes on once the agent there is started again (--timeout)")
            self._seats.on_waiting = self._say_seldom
            self._seats.reopen(self.job.timeout_s)
            try:
                await self.gather()
            except Stopped:
                return self._ended_while_waiting()
        self.number = number
        self._stories, self._still, self._losses, self._finishing = {}, {}, [], None
        if self.job.master is None:
            self._port = keep_port(self.address)
            place = self.job.coordinator.host if self.job.coordinator is not None else self.address
            self.master = Address(place, self._port.getsockname()[1])
        self._all(Begin(number, self.master.host, self.master.port))
        return None

    def _say_seldom(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_S:
            self._said = now
            self.say(line)

    def _ended_while_waiting(self) -> End:
        words = f"allhands: the job was stopped on {self._by} while it waited for a node\n"
        end = End(128 + self._stopped, words, "")
        self._all(Over(self.number, again=False, exit_code=end.exit_code, words=words, report=""))
        return end

    async def host(self, name: str) -> None:
        """Start the coordinator of the ranks; those of other nodes come to it through their agents."""
        self._hosting = Hosting(name, self.token.encode(), self._far.attach)
        hosting = self._hosting
        self._far.coordinator = lambda: hosting.coordinator
        await hosting.start()

    def failing(self) -> None:
        """A worker here failed: the others end theirs."""
        self._finish(EXPLAIN_S)

    def _finish(self, patience_s: float, but: int = -1) -> None:
        if self._finishing is None:
            self._finishing = time.monotonic() + patience_s
            self._all(Finish(self.number, patience_s), but)

    def still(self, *, still: bool, inside: bool) -> None:
        """Note it of this node."""
        self._stands(0, still=still, inside=inside)

    def _stands(self, node: int, *, still: bool, inside: bool) -> None:
        self._still[node] = (still, inside)
        # A node whose workers are all gone in good order holds nobody up.
        running = [each for each in (0, *self._seats.members) if each not in self._stories]
        if self._finishing is None and stands_still(running, self._still):
            self._finishing = time.monotonic()
            self._all(Inquire(self.number))
            if self.attempt is not None:
                self.attempt.inquire()

    def stop(self, number: int) -> int:
        """Someone asked here: tell every node who it was."""
        self._times += 1
        return self._urge(0, number, self._times)

    def _urge(self, node: int, number: int, times: int) -> int:
        name = self._name(node)
        self._stopped, self._by = self._stopped or number, self._by or name
        self._finishing = self._finishing or time.monotonic()
        self._all(Stop(number, name, times), but=node)
        self._changed.set()
        return self._urging.more(name, times)

    # What is told ------------------------------------------------------------------------------------------

    def _heard(self, envoy: Envoy, message: FromDelegate) -> None:
        node = envoy.rank
        match message:
            case Opened() | Data() | Shut():
                self._far.heard(node, envoy.came_from, message)
            case Failing(attempt) if attempt == self.number:
                self._finish(EXPLAIN_S, but=node)
                if self.attempt is not None:
                    self.attempt.finish()
            case Still(attempt, still, inside) if attempt == self.number:
                self._stands(node, still=still, inside=inside)
            case Stopping(number, times):
                more = self._urge(node, number, times)
                if more:
                    self.say(f"{self._name(node)} was asked to stop: ending the job")
                for _ in range(more):
                    if self.attempt is not None:
                        self.attempt.stop(number)
            case Told(attempt, story, clock_s) if attempt == self.number:
                self._stories[node] = shifted(story, time.monotonic() - clock_s)
                self._changed.set()
            case _:
                pass  # Of an attempt that is over, or a Pong.

    def _lost(self, envoy: Envoy, how: str) -> None:
        node = envoy.rank
        self._far.lose(node, f"the agent of its node was lost: {how}")
        if node not in self._stories:
            self._losses.append(self._loss(node, envoy.came_from, how, envoy.received_at))
        self._finish(EXPLAIN_S)
        if self.attempt is not None:
            self.attempt.finish()
        self._changed.set()

    def _loss(self, node: int, address: str, how: str, at_s: float, *, observed: bool = True) -> Loss:
        ranks = ranks_of(self.job.layout, node)
        host = self._hosts[node] if self._hosts else ""
        return Loss(node, host, address, ranks, how, at_s, time.monotonic(), observed=observed)

    # The end -----------------------------------------------------------------------------------------------

    async def settle(self, story: Story) -> End:
        """Wait for the stories of all nodes, judge, and tell everyone."""
        self._stories[0] = story
        await self._collect()
        hosting, self._hosting = self._hosting, None
        if hosting is not None:
            await hosting.close()
        if self._port is not None:
            self._port.close()
            self._port = None
        whole = merge(self._stories)
        findings = [] if hosting is None else hosting.findings
        verdict = judge(whole.outcomes, findings, whole.hanging, self._stopped, by=self._by, lost=self._losses)
        repeat = again(self.job, verdict, self.number, stopped=bool(self._stopped))
        found = report(self.job, self.number, verdict, whole)
        end = End(0 if verdict is None else verdict.exit_code, last_words(verdict, whole), found, again=repeat)
        brief = verdict_text.brief(verdict) if verdict is not None else ""
        self._all(Over(self.number, again=repeat, exit_code=end.exit_code, words=brief, report=found))
        return end

    async def _collect(self) -> None:
        while missing := [node for node in self._seats.members if node not in self._stories]:
            pause = 1.0
            if self._finishing is not None:
                left = self._finishing + self.job.grace_s + PATIENCE_S - time.monotonic()
                if left <= 0:
                    self._losses += [self._silent(node) for node in missing]
                    return
                pause = min(pause, left)
            for node in missing:
                self._say_silence(node)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)

    def _say_silence(self, node: int) -> None:
        """Say that an agent does not answer: it is asked every second. Nobody knows whether it will go on."""
        envoy = self._seats.members[node]
        quiet_s = time.monotonic() - envoy.received_at
        if quiet_s >= SILENT_S:
            self._say_seldom(f"waiting for {silence(self._name(node), quiet_s)}")

    def _silent(self, node: int) -> Loss:
        envoy = self._seats.members[node]
        return self._loss(node, envoy.came_from, "", envoy.received_at, observed=False)

    async def close(self) -> None:
        """Let the others read the last word, then end every connection."""
        if self._hosting is not None:
            await self._hosting.close()
            self._hosting = None
        if self._port is not None:
            self._port.close()
            self._port = None
        self._all(Closing())
        self._seats.on_lost = lambda *_: self._changed.set()
        deadline = time.monotonic() + _GOODBYE_S
        while self._seats.members and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        await self._seats.close()
