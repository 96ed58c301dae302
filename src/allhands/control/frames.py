"""How bytes become frames: a greeting line, then length-prefixed msgpack, with the length checked before reading."""

from __future__ import annotations

import struct

__all__ = ["GREETING", "HEADER", "MOST_BEFORE_PROOF", "MOST_BYTES", "FrameError", "Splitter", "pack"]

# A text line, so that services which speak text (HTTP, Redis, SSH …) answer it at once and can be told
# apart; the blank line ends an HTTP request head.
GREETING = b"ALLHANDS/1\r\n\r\n"

HEADER = struct.Struct(">I")

# A stranger gets no more memory than a handshake needs.
MOST_BEFORE_PROOF = 8 * 1024

# Store values are addresses and pickled plans; checkpoint plans of large models reach tens of MiB.
MOST_BYTES = 64 * 1024 * 1024


class FrameError(Exception):
    """What arrived is not a frame of ours. Never leaves the control plane."""


def pack(body: bytes) -> bytes:
    """Return ``body`` as one frame."""
    if len(body) > MOST_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {MOST_BYTES}")
    return HEADER.pack(len(body)) + body


class Splitter:
    """Cuts a stream of bytes into frames; memory is bounded by ``most`` whatever the stream says."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data`` and return the frames that are now whole; raise FrameError on a length over the limit."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > self.most:
                raise FrameError(f"a frame of {size} bytes is over the limit of {self.most}")
            end = start + HEADER.size + size
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + HEADER.size : end]))
            start = end
        del buffer[:start]
        return frames

    @property
    def held(self) -> bytes:
        """The bytes of an unfinished frame, as evidence of what a wrong service said."""
        return bytes(self._buffer)
