"""The agent of a node other than 0: it does what node 0 says, tells it what happens here, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from ...control.messages import Closing, FrameError, LogLine, Ping, Pong, Refused, Waiting, pack
from ...diagnosis import Diagnosis
from ...environments.world import Address
from ...errors import error
from .. import verdict_text
from ..job import Job
from ..verdict import judge
from .agent_messages import (
    Begin,
    Data,
    Failing,
    Finish,
    FromConvenor,
    FromDelegate,
    Inquire,
    Over,
    Seated,
    Shut,
    Still,
    Stop,
    Stopping,
    Told,
    decode_from_convenor,
)
from .joining import Joined
from .node_loss import PATIENCE_S, SILENT_S, Loss, silence
from .node_role import End, last_words, report
from .nodes import Urging, ranks_of
from .relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..attempt import Attempt, Story

__all__ = ["Delegate"]

# Texts of a worker's end that are longer than this are cut for the way to node 0: all stories must fit in one frame.
_MOST_TEXT = 1 << 18

# How often node 0's silence is looked for, and how often people are told of it.
_LOOK_S, _SAY_S = 1.0, 10.0


class Delegate(asyncio.Protocol):
    """A `company.Company` that obeys. It is the protocol of its own connection to node 0."""

    def __init__(self, job: Job, joined: Joined, *, token: str) -> None:
        self.token = joined.seated.token or token
        self.job = job
        self.address = str(joined.sock.getsockname()[0])
        self.master = Address("", 0)
        self.attempt: Attempt | None = None
        self.say: Callable[[str], None] = lambda _: None
        self._place = str(joined.sock.getpeername()[0])
        self._sock, self._splitter, self._rest = joined.sock, joined.splitter, joined.rest
        self._relay = Relay(self._tell)
        self._transport: asyncio.Transport | None = None
        self.number = 0
        self._begun = -1
        self._over: Over | None = None
        self._changed = asyncio.Event()
        self._lost: Loss | None = None
        self._left = False
        self._refused: Diagnosis | None = None
        # Orders that came before the workers they are for.
        self._early: list[FromConvenor] = []
        self._heard_s = time.monotonic()
        # Since when the attempt is to end, None while it is not; and when people were last told of node 0's silence.
        self._ending_s: float | None = None
        self._said_s = 0.0
        self._urging, self._times, self._by = Urging({}), 0, ""
        self._hosts: list[str] = []
        self._take_seat(joined.seated)

    async def connect(self) -> None:
        """Go on with the connection in the event loop."""
        self._sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._sock)
        for frame in self._rest:
            self._heard(frame)

    def _take_seat(self, seated: Seated) -> None:
        self._hosts = seated.hosts
        self.job = self.job._replace(node_rank=seated.node, layout=tuple(seated.ranks))

    # The connection ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self._transport = transport  # type: ignore[assignment]  # asyncio hands a Transport to stream protocols

    def data_received(self, data: bytes) -> None:
        """Act on each message; what is none ends the connection."""
        self._heard_s = time.monotonic()
        try:
            for frame in self._splitter.feed(data):
                self._heard(frame)
        except (FrameError, msgspec.MsgspecError) as problem:
            self._cut(f"it sent what is no message ({problem})")

    def connection_lost(self, exc: Exception | None) -> None:
        """Node 0 is gone, or we are cut off from it."""
        self._cut(f"the connection to it broke ({exc})" if exc is not None else "the connection to it closed")

    def pause_writing(self) -> None:
        """Of asyncio: the connection is full, so workers are not read from."""
        self._relay.pause(paused=True)

    def resume_writing(self) -> None:
        """Of asyncio."""
        self._relay.pause(paused=False)

    def _cut(self, how: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._left or self._lost is not None:
            return
        self._lost = self._loss(how)
        self._relay.close()
        if self.attempt is not None:
            self.attempt.finish()
        self._changed.set()

    def _tell(self, message: FromDelegate) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(msgspec.msgpack.encode(message)))

    # Orders ------------------------------------------------------------------------------------------------

    def _heard(self, frame: bytes) -> None:
        message = decode_from_convenor(frame)
        match message:
            case Data() | Shut():
                self._relay.heard(message)
            case Ping():
                self._tell(Pong())
            case Seated():
                self._take_seat(message)
            case Begin(attempt, host, port):
                self.master = Address(host, port)
                self._begun = attempt
            case Over():
                self._over = message
            case Refused(diagnosis):
                self._refused = diagnosis
            case LogLine(text):
                self.say(text)
            case Closing() | Waiting():
                pass  # What follows from a goodbye is seen when the connection closes.
            case _:
                self._obey(message)
        self._changed.set()

    def _is_ending(self) -> None:
        if self._ending_s is None:
            self._ending_s = time.monotonic()

    def _obey(self, message: FromConvenor) -> None:
        self._is_ending()
        attempt = self.attempt
        if attempt is None:
            self._early.append(message)
            return
        match message:
            case Finish(number, patience_s) if number == self.number:
                attempt.finish(patience_s)
            case Inquire(number) if number == self.number:
                attempt.inquire()
            case Stop(number, by, times):
                more = self._urging.more(by, times)
                if more:
                    self.say(f"{by} was asked to stop: ending the job")
                for _ in range(more):
                    attempt.stop(number)
            case _:
                pass  # Of an attempt that is over here.

    async def begin(self, number: int) -> End | None:
        """Wait for node 0 to begin; an End where it is gone, or ends the job without."""
        while self._begun < number:
            if self._refused is not None:
                # A node that was lost did not come back.
                raise error(self._refused)
            if self._over is not None and not self._over.again:
                return self._end(self._over)
            if self._lost is not None or self._times > 1:
                return self._alone(None)
            await self._wait()
        self.number, self._over, self._ending_s = self._begun, None, None
        return None

    async def host(self, name: str) -> None:
        """Listen for the workers, who think that we are the coordinator."""
        if self._lost is None:
            await self._relay.listen(name)
        elif self.attempt is not None:
            self.attempt.finish()
        early, self._early = self._early, []
        for message in early:
            self._obey(message)

    def failing(self) -> None:
        """Tell node 0."""
        self._is_ending()
        self._tell(Failing(self.number))

    def still(self, *, still: bool, inside: bool) -> None:
        """Tell node 0, which knows of the other nodes."""
        self._tell(Still(self.number, still, inside))

    def stop(self, number: int) -> int:
        """Someone asked here: node 0 tells the others."""
        self._is_ending()
        self._times += 1
        self._by = "this node"
        self._tell(Stopping(number, self._times))
        self._changed.set()
        return self._urging.more(self._by, self._times)

    # The end -----------------------------------------------------------------------------------------------

    async def settle(self, story: Story) -> End:
        """Tell node 0 how it went here, and wait for its verdict."""
        self._relay.close()
        self._tell(Told(self.number, _cut_texts(story), time.monotonic()))
        # Someone who asks twice is not kept waiting for other nodes.
        while self._over is None and self._lost is None and self._times < 2:
            self._look_for_silence()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait(), _LOOK_S)
        return self._end(self._over) if self._over is not None else self._alone(story)

    def _look_for_silence(self) -> None:
        """Node 0 speaks every second: say so where it is silent, and once the job is to end wait no longer."""
        now = time.monotonic()
        quiet_s = now - self._heard_s
        if self._ending_s is not None and now - max(self._heard_s, self._ending_s) >= PATIENCE_S:
            self._lost = self._loss("", observed=False)
        elif quiet_s >= SILENT_S and now - self._said_s >= _SAY_S:
            self._said_s = now
            self.say(f"waiting for {silence(f'node 0 ({self._hosts[0]})', quiet_s)}")

    def _loss(self, how: str, *, observed: bool = True) -> Loss:
        host, ranks = self._hosts[0] if self._hosts else "", ranks_of(self.job.layout, 0)
        return Loss(0, host, self._place, ranks, how, self._heard_s, time.monotonic(), observed=observed, cut_off=True)

    def _end(self, over: Over) -> End:
        return End(over.exit_code, over.words, over.report, again=over.again)

    def _alone(self, story: Story | None) -> End:
        """Judge by what is known here: node 0 gives no verdict any more."""
        lost = [self._lost] if self._lost is not None else []
        outcomes = [] if story is None else story.outcomes
        stopped = 0 if story is None else story.stopped
        verdict = judge(outcomes, (), None, stopped, by=self._by if stopped else "", lost=lost)
        if story is None:
            words = verdict_text.words(verdict, []) if verdict is not None else "allhands: the job was stopped here\n"
            return End(1, words, "")
        code = 0 if verdict is None else verdict.exit_code
        return End(code, last_words(verdict, story), report(self.job, self.number, verdict, story))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """End the connection."""
        self._left = True
        self._relay.close()
        if self._transport is not None:
            self._transport.close()
        # One pass of the loop lets the transports flush and free their descriptors.
        await asyncio.sleep(0)


def _cut_texts(story: Story) -> Story:
    outcomes = [
        msgspec.structs.replace(
            outcome,
            stack=outcome.stack[-_MOST_TEXT:],
            record={
                name: text[-_MOST_TEXT:] if isinstance(text, str) else text for name, text in outcome.record.items()
            },
        )
        for outcome in story.outcomes
    ]
    hanging = story.hanging
    if hanging is not None:
        hanging = msgspec.structs.replace(
            hanging, stacks={rank: text[:_MOST_TEXT] for rank, text in hanging.stacks.items()}
        )
    return msgspec.structs.replace(story, outcomes=outcomes, hanging=hanging)
