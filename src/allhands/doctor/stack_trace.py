"""Where a rank's main thread is: its stack, from whoever can tell, and the line of the user's in it."""

from __future__ import annotations

import json
import linecache
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ..observe import stacks

__all__ = ["Frame", "Trace", "frames", "of", "users"]

# What faulthandler writes for a frame.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

# A rank that answers at all does so within this, also where it has to wait for a core.
_ANSWER_S = 1.0

# py-spy stops the process, reads it and lets it go on, in tenths of a second.
_SPY_S = 3.0

_OURS = str(Path(__file__).parents[1])
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen |^<string>$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def site(self) -> str:
        """``file:line``, as the board has it."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def source(self) -> str:
        """The line itself, "" where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        code = f": {self.source}" if self.source else ""
        return f"{self.site} in {self.function}{code}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The main thread's stack, innermost first; ``by`` says who told, "" where nobody could."""

    frames: tuple[Frame, ...] = ()
    by: str = ""
    text: str = ""


def of(pid: int) -> Trace:
    """Return the stack of the main thread of ``pid``: by its own handler, else by py-spy where that is installed."""
    text = stacks.request(pid, _ANSWER_S)
    if text:
        return Trace(frames(text), "its own handler", text)
    spy = shutil.which("py-spy")
    return _spied(spy, pid) if spy is not None else Trace()


def frames(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames from what faulthandler wrote.

    The signal goes to the main thread if it can take it, and that one is called the current; else it is the last one,
    because threads are listed from the youngest to the oldest.
    """
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            blocks.append((line, []))
        elif blocks and (match := _FRAME.match(line)):
            blocks[-1][1].append(Frame(match[1], int(match[2]), match[3]))
    current = [each for head, each in blocks if head.startswith("Current") and each]
    return tuple(current[0] if current else blocks[-1][1] if blocks else ())


def users(found: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame that is the user's: neither Python's library, nor an installed package, nor ours."""
    standard = sysconfig.get_path("stdlib")
    for frame in found:
        if not frame.file.startswith((_OURS, standard)) and not _LIBRARY.search(frame.file):
            return frame
    return found[0] if found else None


def _spied(spy: str, pid: int) -> Trace:
    try:
        done = subprocess.run(
            [spy, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True, timeout=_SPY_S, check=False
        )
        threads = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return Trace()
    main = next((each for each in threads if each.get("thread_name") == "MainThread"), threads[0] if threads else None)
    if main is None:
        return Trace()
    made = tuple(Frame(each["filename"], int(each["line"]), each["name"]) for each in main["frames"])
    return Trace(made, "py-spy", "\n".join(map(str, made)))
