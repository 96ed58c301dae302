"""The GPUs of this machine and who uses them, as nvidia-smi tells."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .proc_status import look

__all__ = ["Card", "User", "cards", "device_files"]

# It answers in a quarter of a second on most machines, and in one where the driver has to be woken first.
_TOOL_S = 1.6


@dataclass(frozen=True, slots=True)
class User:
    """A process that has memory on a GPU."""

    pid: int
    command: str
    memory: str
    mine: bool

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command[:40]}, {self.memory})"


@dataclass(slots=True)
class Card:
    """One GPU."""

    index: str
    uuid: str
    name: str
    memory: str
    users: list[User] = field(default_factory=list)


def device_files() -> bool:
    """Tell whether the kernel shows a GPU of NVIDIA's."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def cards() -> tuple[list[Card], str]:
    """Return the GPUs with their users, and why nvidia-smi could not say; "" where it could."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], "nvidia-smi is not installed"
    rows, trouble = _ask(tool, "--query-gpu=index,uuid,name,memory.total")
    found = {row[1]: Card(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4}
    if found and not trouble:
        users, _ = _ask(tool, "--query-compute-apps=gpu_uuid,pid,used_memory")
        for uuid, pid, memory in (row for row in users if len(row) == 3):
            if uuid in found and pid.isdecimal():
                seen = look(int(pid))
                command = seen.command if seen is not None else "of another container"
                found[uuid].users.append(User(int(pid), command, memory, seen is not None and seen.uid == os.getuid()))
    return list(found.values()), trouble


def _ask(tool: str, question: str) -> tuple[list[list[str]], str]:
    try:
        done = subprocess.run(
            [tool, question, "--format=csv,noheader"], capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"it did not answer within {_TOOL_S:g} s"
    except OSError as problem:
        return [], problem.strerror or str(problem)
    if done.returncode != 0:
        return [], (done.stdout + done.stderr).strip().splitlines()[0] if done.stdout + done.stderr else "it failed"
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()], ""
