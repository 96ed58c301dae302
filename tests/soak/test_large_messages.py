"""Messages larger than 4 GiB."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
import pytest

from allhands import _core

pytestmark = pytest.mark.soak

LIMIT_NS = 300_000_000_000
PIECE = 16 << 20


def wide(pieces: int) -> tuple[int, np.ndarray]:
    """Return the address of ``pieces`` views in a row of one piece of memory, and that piece.

    So that gigabytes can be sent and received without having them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    descriptor = os.memfd_create("wide")
    os.ftruncate(descriptor, PIECE)
    none, fixed = 0, 0x10
    base = libc.mmap(None, PIECE * pieces, none, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for number in range(pieces):
        at = libc.mmap(
            base + number * PIECE, PIECE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, descriptor, 0
        )
        assert at == base + number * PIECE
    os.close(descriptor)
    return base, np.frombuffer((ctypes.c_uint8 * PIECE).from_address(base), dtype="u1")


def test_a_message_of_more_than_four_gibibytes() -> None:
    """All bytes arrive, and sizes are compared in 64 bits: 4 GiB more is a mismatch."""
    size, nonce = _core.segment_bytes(2, 4096), os.urandom(16)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    _core.segment_format(descriptor, 2, 4096, nonce)
    one, two = (_core.P2P(_core.Segment(descriptor, size, rank, nonce, (-1, -1))) for rank in (0, 1))
    os.close(descriptor)
    pieces = (4 << 30) // PIECE + 1
    source, filled = wide(pieces)
    target, got = wide(pieces)
    filled[:] = np.random.default_rng(1).integers(0, 256, PIECE, dtype="u1")
    whole = PIECE * pieces - 5
    thread = threading.Thread(target=lambda: one.send(source, whole, 1, 1, 0, LIMIT_NS))
    thread.start()
    assert two.recv(target, whole, 1, 0, 0, LIMIT_NS) == 0
    thread.join()
    assert np.array_equal(filled, got)
    request = one.post_send(source, whole, 1, 1, 0, LIMIT_NS, 0)
    assert two.recv(target, whole - (4 << 30), 1, 0, 0, LIMIT_NS) % 256 == 4
    assert one.mismatch() == (0, 1, 0, 1, whole, 1, whole - (4 << 30))
    del request
