"""The folder in which a command and its ranks meet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["near"]


@contextlib.contextmanager
def near(folder: Path) -> Iterator[str]:
    """Yield another path to ``folder``, short enough for the address of a socket in it: those end at 108 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
