"""Workers' connections to the coordinator, carried by their agent's connection to the leader.

    worker -- Unix socket -- WorkerTunnel (follower) == agents' connection == CoordinatorTunnel (leader) -- Coordinator

Each connection is a channel with a number. The agents do not interpret its bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from ...control.process_identity import peer_credentials
from .agent_messages import ChannelClosed, ChannelData, ChannelOpened

__all__ = ["CoordinatorTunnel", "WorkerTunnel"]

# A worker's last message may be in its socket when its process is gone: it is read first.
_LAST_MESSAGE_S = 0.05

# Bytes that a worker does not read, after which its connection is closed, as the coordinator does.
_MOST_UNREAD = 128 << 20

# Bytes that a worker may send before there is a coordinator: a greeting and a claim.
_MOST_EARLY = 1 << 20

# Bytes in one message, so that messages of other channels can be sent in between.
_PIECE_BYTES = 1 << 20


class WorkerTunnel:
    """A follower's end: accepts workers where they expect the coordinator, and forwards their bytes."""

    def __init__(self, send: Callable[[ChannelOpened | ChannelData | ChannelClosed], None]) -> None:
        """``send`` sends a message to the leader."""
        self.send = send
        self.channels: dict[int, _WorkerConnection] = {}
        self.paused = False
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None

    async def listen(self, socket_name: str) -> None:
        """Listen on an abstract Unix socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _WorkerConnection(self), "\0" + socket_name, backlog=4096)

    def add(self, connection: _WorkerConnection) -> int:
        """Open a channel for a connection; return its number."""
        number = next(self._numbers)
        self.channels[number] = connection
        self.send(ChannelOpened(number))
        return number

    def received(self, message: ChannelData | ChannelClosed) -> None:
        """Forward a message of the coordinator; a channel that was closed meanwhile ignores it."""
        connection = self.channels.get(message.channel)
        if connection is None:
            return
        if isinstance(message, ChannelData):
            connection.write(message.body)
        else:
            connection.close(half=message.half)

    def pause(self, *, paused: bool) -> None:
        """Stop or continue reading from workers: the agents' connection applies back-pressure."""
        self.paused = paused
        for connection in self.channels.values():
            connection.pause(paused=paused)

    def close(self) -> None:
        """Stop listening, and close every worker's connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.channels.values()):
            connection.close()


class _WorkerConnection(asyncio.Protocol):
    """One worker's connection to its agent."""

    def __init__(self, tunnel: WorkerTunnel) -> None:
        self._tunnel = tunnel
        self._number = 0
        self._transport: asyncio.Transport | None = None
        self._pidfd: int | None = None
        self._how = "its connection closed"

    @property
    def _open_transport(self) -> asyncio.Transport | None:
        return None if self._transport is None or self._transport.is_closing() else self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users; watch the process, because its children may hold the connection open."""
        self._transport = transport  # type: ignore[assignment]  # asyncio passes a Transport to stream protocols
        sock: socket.socket = transport.get_extra_info("socket")
        pid, uid = peer_credentials(sock)
        if uid not in {os.getuid(), 0}:
            transport.abort()  # type: ignore[attr-defined]  # the same
            return
        self._number = self._tunnel.add(self)
        self.pause(paused=self._tunnel.paused)
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            return  # The process is gone; its connection will close.
        asyncio.get_running_loop().add_reader(self._pidfd, self._process_ended)

    def data_received(self, data: bytes) -> None:
        """Forward it to the coordinator."""
        if self._number:
            self._tunnel.send(ChannelData(self._number, data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the channel, after the data that was received."""
        self._unwatch()
        if self._number and self._tunnel.channels.pop(self._number, None) is self:
            how = f"its connection broke ({exc})" if exc is not None else self._how
            self._tunnel.send(ChannelClosed(self._number, how))

    def write(self, body: bytes) -> None:
        """Send ``body`` to the worker."""
        if transport := self._open_transport:
            transport.write(body)
            if transport.get_write_buffer_size() > _MOST_UNREAD:
                self._how = "it stopped reading"
                transport.abort()

    def close(self, *, half: bool = False) -> None:
        """Close the connection; with ``half``, only for writing."""
        if transport := self._open_transport:
            transport.write_eof() if half else transport.close()

    def pause(self, *, paused: bool) -> None:
        """Stop or continue reading."""
        if transport := self._open_transport:
            transport.pause_reading() if paused else transport.resume_reading()

    def _process_ended(self) -> None:
        self._unwatch()
        asyncio.get_running_loop().call_later(_LAST_MESSAGE_S, self._abort)

    def _abort(self) -> None:
        if transport := self._open_transport:
            self._how = "its process ended"
            transport.abort()

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class CoordinatorTunnel:
    """The leader's end: presents the channels of all other nodes to the coordinator as connections."""

    def __init__(self, send: Callable[[int, ChannelData | ChannelClosed], None]) -> None:
        """``send`` sends a message to a node."""
        self.send = send
        # Returns the current coordinator.
        self.coordinator: Callable[[], Coordinator | None] = lambda: None
        self._channels: dict[tuple[int, int], _ChannelTransport] = {}

    def received(self, node: int, came_from: str, message: ChannelOpened | ChannelData | ChannelClosed) -> None:
        """Handle a message of ``node`` about one of its workers' connections."""
        key = (node, message.channel)
        match message:
            case ChannelOpened():
                self._channels[key] = _ChannelTransport(self, key, came_from)
                self.attach()
            case ChannelData():
                channel = self._channels.get(key)
                if channel is not None:
                    channel.received(message.body)
            case ChannelClosed():
                channel = self._channels.pop(key, None)
                if channel is not None:
                    channel.ended(message.how)

    def attach(self) -> None:
        """Connect the channels that were opened before there was a coordinator."""
        coordinator = self.coordinator()
        if coordinator is not None:
            for channel in list(self._channels.values()):
                channel.attach(coordinator)

    def node_lost(self, node: int, how: str) -> None:
        """Close every channel of ``node``."""
        for key in [key for key in self._channels if key[0] == node]:
            self._channels.pop(key).ended(how)

    def forget(self, key: tuple[int, int]) -> None:
        """Ignore further messages under a channel that the coordinator closed."""
        self._channels.pop(key, None)


class _TunneledConnection(Connection):
    """A member's connection that arrived through its agent."""

    def __init__(self, coordinator: Coordinator, came_from: str) -> None:
        super().__init__(coordinator)
        self.came_from = came_from
        # Unread bytes are bounded on the agents' connection, for all ranks of the node.
        self.most_unread = float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept it: its agent has checked the peer's user."""
        self._transport = transport  # type: ignore[assignment]  # a Transport
        self.coordinator.connected(self)

    def ended(self, how: str) -> None:
        """Entry the end that its agent reported."""
        self._how = how
        self._ended()


class _ChannelTransport(asyncio.Transport):
    """One channel, as the transport of the coordinator's connection."""

    def __init__(self, tunnel: CoordinatorTunnel, key: tuple[int, int], came_from: str) -> None:
        super().__init__()
        self._tunnel, self._key, self._came_from = tunnel, key, came_from
        self._early = bytearray()
        self._connection: _TunneledConnection | None = None
        self._closed = False

    def attach(self, coordinator: Coordinator) -> None:
        """Connect to the coordinator, unless that is done."""
        if self._connection is None and not self._closed:
            self._connection = _TunneledConnection(coordinator, self._came_from)
            self._connection.connection_made(self)
            early, self._early = bytes(self._early), bytearray()
            if early:
                self._connection.data_received(early)

    def received(self, body: bytes) -> None:
        """Pass the worker's bytes to the coordinator."""
        if self._closed:
            return
        if self._connection is not None:
            self._connection.data_received(body)
        elif len(self._early) + len(body) <= _MOST_EARLY:
            self._early += body
        else:
            self.abort()

    def ended(self, how: str) -> None:
        """Entry that the worker's end is closed."""
        self._closed = True
        if self._connection is not None:
            self._connection.ended(how)

    # The interface of asyncio.Transport, for the coordinator -------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send to the worker in pieces: a message of the coordinator may be as large as one of the agents."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            if not self._closed:
                self._tunnel.send(self._key[0], ChannelData(self._key[1], bytes(view[start : start + _PIECE_BYTES])))

    def get_write_buffer_size(self) -> int:
        """Return 0: data waits on the agents' connection."""
        return 0

    def can_write_eof(self) -> bool:
        """Return True: a channel can be half closed."""
        return True

    def write_eof(self) -> None:
        """Send no more, and continue to read."""
        if not self._closed:
            self._tunnel.send(self._key[0], ChannelClosed(self._key[1], half=True))

    def is_closing(self) -> bool:
        """Return whether the channel is closed."""
        return self._closed

    def close(self) -> None:
        """Close the channel after the data that was written."""
        if self._closed:
            return
        self._closed = True
        self._tunnel.forget(self._key)
        self._tunnel.send(self._key[0], ChannelClosed(self._key[1]))
        if self._connection is not None:
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def abort(self) -> None:
        """Close the channel; as messages are in order, nothing is faster."""
        self.close()
