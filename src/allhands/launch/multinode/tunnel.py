"""Workers' connections to the coordinator, carried by their agent's connection to the leader.

    worker -- Unix socket -- WorkerTunnel (follower) == agents' connection == CoordinatorTunnel (leader) -- Coordinator

Each connection is a channel with a number. The agents do not interpret its bytes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from .agent_messages import ChannelClosed, ChannelData, ChannelOpened

__all__ = ["CoordinatorTunnel", "WorkerTunnel"]

# Bytes that a worker may send before there is a coordinator: a greeting and a claim.
_MOST_EARLY = 1 << 20

# Bytes in one message, so that messages of other channels can be sent in between.
_PIECE_BYTES = 1 << 20


class WorkerTunnel:
    """A follower's end: accepts workers where they expect the coordinator, and forwards their bytes."""

    # Of the `Server` of a connection; the handshake is with the coordinator.
    token = b""

    def __init__(self, send: Callable[[ChannelOpened | ChannelData | ChannelClosed], None]) -> None:
        """``send`` sends a message to the leader."""
        self.send = send
        self._channels: dict[int, _WorkerConnection] = {}
        self._paused = False
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None

    async def listen(self, socket_name: str) -> None:
        """Listen on an abstract Unix socket."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _WorkerConnection(self, next(self._numbers)), "\0" + socket_name, backlog=4096
        )

    def connected(self, connection: _WorkerConnection) -> None:
        """Open a channel for a connection."""
        self._channels[connection.channel] = connection
        self.send(ChannelOpened(connection.channel))
        connection.pause(paused=self._paused)

    def disconnected(self, connection: _WorkerConnection, how: str) -> None:
        """Close the channel of a connection, after the data that was received."""
        if self._channels.pop(connection.channel, None) is not None:
            self.send(ChannelClosed(connection.channel, how))

    def received(self, message: ChannelData | ChannelClosed) -> None:
        """Forward a message of the coordinator; a channel that was closed meanwhile ignores it."""
        connection = self._channels.get(message.channel)
        match message:
            case _ if connection is None:
                pass
            case ChannelData(_, body):
                connection.write(body)
            case ChannelClosed(half=True):
                connection.close_write()
            case ChannelClosed():
                connection.close()

    def pause(self, *, paused: bool) -> None:
        """Stop or continue reading from workers: the agents' connection applies back-pressure."""
        self._paused = paused
        for connection in self._channels.values():
            connection.pause(paused=paused)

    def close(self) -> None:
        """Stop listening, and close every worker's connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self._channels.values():
            connection.close()


class _WorkerConnection(Connection):
    """One worker's connection to its agent, which forwards the bytes under the number ``channel``."""

    coordinator: WorkerTunnel  # type: ignore[assignment]  # has what is called without a handshake

    def __init__(self, tunnel: WorkerTunnel, channel: int) -> None:
        super().__init__(tunnel, local=True)  # type: ignore[arg-type]  # the same
        self.channel = channel

    def data_received(self, data: bytes) -> None:
        """Forward it to the coordinator."""
        self.coordinator.send(ChannelData(self.channel, data))

    def pause(self, *, paused: bool) -> None:
        """Stop or continue reading."""
        if self._transport is not None:
            self._transport.pause_reading() if paused else self._transport.resume_reading()


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

    def write(self, data: bytes) -> None:
        """Send in pieces: a message of the coordinator may be as large as one of the agents.

        Unread bytes are bounded on the agents' connection, for all ranks of the node.
        """
        if not self._write_closed:
            for start in range(0, len(data), _PIECE_BYTES):
                self._send(ChannelData(self._key[1], data[start : start + _PIECE_BYTES]))

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
