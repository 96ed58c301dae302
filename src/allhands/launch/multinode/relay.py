"""The workers' connections inside their agent's one: this node's end. Bytes pass unread, each under its channel."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable

from ...control.process_identity import peer_credentials
from .agent_messages import Data, Opened, Shut

__all__ = ["Relay"]

# What a worker said last may still be in its socket when its process is gone: read that first.
_LAST_WORDS_S = 0.05

# Bytes that a worker does not read, after which it is cut off: as the coordinator itself does.
_MOST_UNREAD = 128 << 20

_Send = Callable[[Opened | Data | Shut], None]


class Relay:
    """Listens where this node's workers look for the coordinator, and passes on what they say."""

    def __init__(self, send: _Send) -> None:
        self.send = send
        self.channels: dict[int, _Channel] = {}
        self.paused = False
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None

    async def listen(self, name: str) -> None:
        """Listen on the abstract Unix socket ``name``."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Channel(self), "\0" + name, backlog=4096)

    def admit(self, channel: _Channel) -> int:
        """Give a new connection its number."""
        number = next(self._numbers)
        self.channels[number] = channel
        self.send(Opened(number))
        return number

    def heard(self, message: Data | Shut) -> None:
        """Pass on what the coordinator says; a channel that is gone meanwhile needs nothing."""
        channel = self.channels.get(message.channel)
        if channel is None:
            return
        if isinstance(message, Data):
            channel.write(message.body)
        else:
            channel.shut(half=message.half)

    def pause(self, *, paused: bool) -> None:
        """Read no more from workers while the connection between agents is full; or read again."""
        self.paused = paused
        for channel in self.channels.values():
            channel.pause(paused=paused)

    def close(self) -> None:
        """End every worker's connection and listen no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for channel in list(self.channels.values()):
            channel.shut()


class _Channel(asyncio.Protocol):
    """One worker's connection to its agent."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._number = 0
        self._transport: asyncio.Transport | None = None
        self._pidfd: int | None = None
        self._how = "its connection closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users; see the worker's death even while a child of its holds the connection open."""
        self._transport = transport  # type: ignore[assignment]  # asyncio hands a Transport to stream protocols
        sock: socket.socket = transport.get_extra_info("socket")
        pid, uid = peer_credentials(sock)
        if uid not in {os.getuid(), 0}:
            transport.abort()  # type: ignore[attr-defined]  # the same
            return
        self._number = self._relay.admit(self)
        self.pause(paused=self._relay.paused)
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            return  # It is gone already, which its connection says too.
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._number:
            self._relay.send(Data(self._number, data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so upwards, after everything that it had said."""
        self._unwatch()
        if self._number and self._relay.channels.pop(self._number, None) is self:
            self._relay.send(Shut(self._number, f"its connection broke ({exc})" if exc is not None else self._how))

    def write(self, body: bytes) -> None:
        """Say ``body`` to the worker."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(body)
            if self._transport.get_write_buffer_size() > _MOST_UNREAD:
                self._how = "it stopped reading"
                self._transport.abort()

    def shut(self, *, half: bool = False) -> None:
        """End the connection; ``half``: only our side of it."""
        if self._transport is None or self._transport.is_closing():
            return
        if half:
            self._transport.write_eof()
        else:
            self._transport.close()

    def pause(self, *, paused: bool) -> None:
        """Stop or go on reading."""
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _died(self) -> None:
        self._unwatch()
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._died_quietly)

    def _died_quietly(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._how = "its process ended"
            self._transport.abort()

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
