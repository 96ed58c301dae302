"""The workers' connections inside their agent's one: node 0's end, which hands them to the ranks' coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from .agent_messages import Data, Opened, Shut

__all__ = ["Far"]

# What a worker may say before there is a coordinator to hear it: a greeting and a claim.
_MOST_EARLY = 1 << 20

# How much of what the coordinator says goes into one message, so that others get their turn between.
_PIECE = 1 << 20

_Send = Callable[[int, Data | Shut], None]


class Far:
    """All channels of all other nodes."""

    def __init__(self, send: _Send) -> None:
        """``send`` takes a node and a message for it."""
        self.send = send
        self.coordinator: Callable[[], Coordinator | None] = lambda: None
        self._channels: dict[tuple[int, int], _Channel] = {}

    def heard(self, node: int, came_from: str, message: Opened | Data | Shut) -> None:
        """Act on what ``node`` says about one of its workers' connections."""
        key = (node, message.channel)
        match message:
            case Opened():
                self._channels[key] = _Channel(self, key, came_from)
                self.attach()
            case Data():
                channel = self._channels.get(key)
                if channel is not None:
                    channel.take(message.body)
            case Shut():
                channel = self._channels.pop(key, None)
                if channel is not None:
                    channel.over(message.how)

    def attach(self) -> None:
        """Hand those who came early to the coordinator, where there is one now."""
        coordinator = self.coordinator()
        if coordinator is not None:
            for channel in list(self._channels.values()):
                channel.attach(coordinator)

    def lose(self, node: int, how: str) -> None:
        """The agent of ``node`` is gone, and every connection of its workers with it."""
        for key in [key for key in self._channels if key[0] == node]:
            self._channels.pop(key).over(how)

    def forget(self, key: tuple[int, int]) -> None:
        """The coordinator closed a channel: what still comes under it is nobody's."""
        self._channels.pop(key, None)


class _FarConnection(Connection):
    """A member's connection that came through its agent."""

    def __init__(self, coordinator: Coordinator, came_from: str) -> None:
        super().__init__(coordinator)
        self.came_from = came_from
        # What is unread waits on the agents' connection, for all ranks of the node, and is bounded there.
        self.most_unread = float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its agent saw where it came from, and checked the user."""
        self._transport = transport  # type: ignore[assignment]  # a Transport
        self.coordinator.connected(self)

    def over(self, how: str) -> None:
        """Its agent says that the connection ended."""
        self._how = how
        self._ended()


class _Channel(asyncio.Transport):
    """One worker's connection, as the transport of the coordinator's end."""

    def __init__(self, far: Far, key: tuple[int, int], came_from: str) -> None:
        super().__init__()
        self._far, self._key, self._came_from = far, key, came_from
        self._early = bytearray()
        self._connection: _FarConnection | None = None
        self._closed = False

    def attach(self, coordinator: Coordinator) -> None:
        """Begin to be heard, where that has not begun."""
        if self._connection is None and not self._closed:
            self._connection = _FarConnection(coordinator, self._came_from)
            self._connection.connection_made(self)
            early, self._early = bytes(self._early), bytearray()
            if early:
                self._connection.data_received(early)

    def take(self, body: bytes) -> None:
        """The worker said ``body``."""
        if self._closed:
            return
        if self._connection is not None:
            self._connection.data_received(body)
        elif len(self._early) + len(body) <= _MOST_EARLY:
            self._early += body
        else:
            self.abort()

    def over(self, how: str) -> None:
        """The worker's end is closed."""
        self._closed = True
        if self._connection is not None:
            self._connection.over(how)

    # What the coordinator's end calls ------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send to the worker, in pieces: the largest message that it may be sent is as large as one of ours."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            if not self._closed:
                self._far.send(self._key[0], Data(self._key[1], bytes(view[start : start + _PIECE])))

    def get_write_buffer_size(self) -> int:
        """Say that nothing waits here: it waits on the agents' connection."""
        return 0

    def can_write_eof(self) -> bool:
        """One side can end before the other."""
        return True

    def write_eof(self) -> None:
        """Say nothing more, but listen."""
        if not self._closed:
            self._far.send(self._key[0], Shut(self._key[1], half=True))

    def is_closing(self) -> bool:
        """Whether it is over."""
        return self._closed

    def close(self) -> None:
        """End the connection after what was said."""
        if self._closed:
            return
        self._closed = True
        self._far.forget(self._key)
        self._far.send(self._key[0], Shut(self._key[1]))
        if self._connection is not None:
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def abort(self) -> None:
        """End it; messages are in order, so nothing is faster than that."""
        self.close()
