"""A process of a bench: its plan, and its connection to the command.

Rank 0 sends one JSON object a line and waits for a byte in reply, so that nothing is measured while the command draws
its progress. If the connection of a rank to the command breaks, the command is gone, and the rank exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from .processes import PLAN, short_path

__all__ = ["CommandConnection", "serve"]


class CommandConnection:
    """The connection to the command."""

    def __init__(self, path: str, folder: str) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with short_path(Path(path).parent) as place:
                self._socket.connect(f"{place}/{Path(path).name}")
        except OSError:
            self._alone()
        self._answers = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # A command that is killed before it has read all messages resets the connection instead of closing it.
        with contextlib.suppress(ConnectionResetError):
            while data := self._socket.recv(64):
                for _ in data:
                    self._answers.release()
        self._alone()

    def _alone(self) -> NoReturn:
        """Remove the folder of the command, which was killed, and exit."""
        shutil.rmtree(self._folder, ignore_errors=True)
        # Other threads may be inside an engine that nothing else would end.
        os._exit(1)

    def tell(self, *, wait: bool = False, **message: Any) -> None:
        """Send ``message``; with ``wait``, return when the command has processed it."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._alone()
        if wait:
            self._answers.acquire()


def serve(
    kind: type[Any],
    measure: Callable[[Any, int, CommandConnection], None],
    mpi_rank: Callable[[Any], int] | None = None,
) -> None:
    """Run ``measure`` with the plan, which is of ``kind``, and the rank; report its end to the command.

    argv holds the command's folder, with its socket and the plan, and the rank: -1 where ``mpi_rank`` returns it.
    """
    folder, number = sys.argv[1:3]
    rank = int(number)
    line = CommandConnection(f"{folder}/socket", folder)
    try:
        plan = msgspec.json.decode(Path(folder, PLAN).read_bytes(), type=kind)
        if mpi_rank is not None and rank < 0:
            rank = mpi_rank(plan)
            # Not through mpirun, which would mix the output of the ranks.
            with Path(folder, str(rank)).open("ab") as printed:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
        line.tell(rank=rank, pid=os.getpid())
        measure(plan, rank, line)
    except BaseException as problem:  # noqa: BLE001  # reported, whatever it is
        traceback.print_exc()
        line.tell(rank=rank, failed="".join(traceback.format_exception_only(problem)).strip())
        sys.stderr.flush()
        # A normal exit would run MPI's finalizer, which waits for ranks that wait for this one.
        os._exit(1)
    line.tell(rank=rank, done=True)
