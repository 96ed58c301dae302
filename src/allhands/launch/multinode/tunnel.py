"""Workers' connections to the coordinator, carried by their agent's connection to the leader.

    worker -- Unix socket -- WorkerTunnel (follower) == agents' connection == CoordinatorTunnel (leader) -- Coordinator

Each connection is a channel with a number. The agents do not interpret its bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from ...control.messages import pack
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
        self._paused = False
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
        if self._paused:
            connection.transport.pause_reading()
        return number

    def received(self, message: ChannelData | ChannelClosed) -> None:
        """Forward a message of the coordinator; a channel that was closed meanwhile ignores it."""
        connection = self.channels.get(message.channel)
        match message:
            case _ if connection is None or connection.transport.is_closing():
                pass
            case ChannelData(_, body):
                connection.write(body)
            case ChannelClosed(half=True):
                connection.transport.write_eof()
            case ChannelClosed():
                connection.transport.close()

    def pause(self, *, paused: bool) -> None:
        """Stop or continue reading from workers: the agents' connection applies back-pressure."""
        self._paused = paused
        for connection in self.channels.values():
            if paused:
                connection.transport.pause_reading()
            else:
                connection.transport.resume_reading()

    def close(self) -> None:
        """Stop listening, and close every worker's connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self.channels.values():
            connection.transport.close()


class _WorkerConnection(asyncio.Protocol):
    """One worker's connection to its agent."""

    transport: asyncio.Transport

    def __init__(self, tunnel: WorkerTunnel) -> None:
        self._tunnel = tunnel
        self._number = 0
        self._pidfd: int | None = None
        self._how = "its connection closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users; watch the process, because its children may hold the connection open."""
        self.transport = transport  # type: ignore[assignment]  # asyncio passes a Transport to stream protocols
        pid, uid = peer_credentials(transport.get_extra_info("socket"))
        if uid not in {os.getuid(), 0}:
            self.transport.abort()
            return
        self._number = self._tunnel.add(self)
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
        if self._tunnel.channels.pop(self._number, None) is self:
            how = f"its connection broke ({exc})" if exc is not None else self._how
            self._tunnel.send(ChannelClosed(self._number, how))

    def write(self, body: bytes) -> None:
        """Send ``body`` to the worker."""
        self.transport.write(body)
        if self.transport.get_write_buffer_size() > _MOST_UNREAD:
            self._abort("it stopped reading")

    def _process_ended(self) -> None:
        self._unwatch()
        asyncio.get_running_loop().call_later(_LAST_MESSAGE_S, self._abort, "its process ended")

    def _abort(self, how: str) -> None:
        self._how = how
        self.transport.abort()

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
        # By node and channel.
        self.channels: dict[tuple[int, int], _TunneledConnection] = {}
        # Returns the current coordinator; None while there is none.
        self.coordinator: Callable[[], Coordinator | None] = lambda: None
        # Channels that were opened before there was a coordinator: the address, and what was received.
        self._early: dict[tuple[int, int], tuple[str, bytearray]] = {}

    def received(self, node: int, came_from: str, message: ChannelOpened | ChannelData | ChannelClosed) -> None:
        """Handle a message of ``node`` about one of its workers' connections."""
        key = (node, message.channel)
        match message:
            case ChannelOpened():
                self._early[key] = (came_from, bytearray())
                self.attach()
            case ChannelData(_, body) if key in self.channels:
                self.channels[key].data_received(body)
            case ChannelData(_, body) if key in self._early:
                data = self._early[key][1]
                data += body
                if len(data) > _MOST_EARLY:
                    del self._early[key]
                    self.send(node, ChannelClosed(message.channel))
            case ChannelClosed(_, how):
                self._close(key, how)
            case _:
                pass  # Of a channel that was closed here meanwhile.

    def attach(self) -> None:
        """Connect the channels that were opened before there was a coordinator."""
        coordinator = self.coordinator()
        if coordinator is None:
            return
        early, self._early = self._early, {}
        for key, (came_from, data) in early.items():
            connection = self.channels[key] = _TunneledConnection(coordinator, self, key, came_from)
            coordinator.connected(connection)
            connection.data_received(bytes(data))

    def node_lost(self, node: int, how: str) -> None:
        """Close every channel of ``node``."""
        for key in [*self.channels, *self._early]:
            if key[0] == node:
                self._close(key, how)

    def _close(self, key: tuple[int, int], how: str) -> None:
        self._early.pop(key, None)
        connection = self.channels.pop(key, None)
        if connection is not None:
            connection.drop(how)


class _TunneledConnection(Connection):
    """A member's connection that arrived through its agent, which has checked the peer's user."""

    def __init__(
        self, coordinator: Coordinator, tunnel: CoordinatorTunnel, key: tuple[int, int], came_from: str
    ) -> None:
        super().__init__(coordinator)
        self.came_from = came_from
        self._tunnel, self._key = tunnel, key

    def send_body(self, body: bytes) -> None:
        """Send in pieces: a message of the coordinator may be as large as one of the agents.

        Unread bytes are bounded on the agents' connection, for all ranks of the node.
        """
        frame = memoryview(pack(body))
        if not self._write_closed:
            for start in range(0, len(frame), _PIECE_BYTES):
                self._send(ChannelData(self._key[1], bytes(frame[start : start + _PIECE_BYTES])))

    def close_write(self) -> None:
        """Send no more, and continue to read."""
        if not self._write_closed:
            self._write_closed = True
            self._send(ChannelClosed(self._key[1], half=True))

    def close(self) -> None:
        """Close the channel after the data that was written; further messages under it are ignored."""
        self._write_closed = True
        if self._tunnel.channels.pop(self._key, None) is not None:
            self._send(ChannelClosed(self._key[1]))
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def drop(self, how: str) -> None:
        """Close the channel; as messages are in order, nothing is faster."""
        self.close()
        super().drop(how)

    def _send(self, message: ChannelData | ChannelClosed) -> None:
        self._tunnel.send(self._key[0], message)
