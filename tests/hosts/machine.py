"""A machine for a recipe: a host of the laboratory with a name of its own, on which commands are typed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hosts.conftest import Host, Network, ip
from hosts.enter_host import CLONE_NEWNET

__all__ = ["Machine", "Typed", "finish", "routed", "typed", "within"]

_T = TypeVar("_T")
_COMMAND = Path(__file__).with_name("command.py")

# Variables of the launch environment of the test run itself, which a recipe must not see.
_STRANGE = ("ALLHANDS_", "SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")


def within(namespace: str, make: Callable[[], _T]) -> _T:
    """Return what ``make`` returns in the network of ``namespace``; a socket that it opens stays there."""
    made: list[_T] = []

    def enter() -> None:
        # Only this thread moves, and it ends at once.
        with (Path("/run/netns") / namespace).open() as place:
            assert ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET) == 0
        made.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return made[0]


def routed(made: Network) -> list[Host]:
    """Return the hosts of a network, each with a default route, as machines have."""
    ip(*(f"-n {host.namespace} route add default dev eth0" for host in made.hosts))
    return made.hosts


@dataclass(slots=True)
class Typed:
    """A command that was typed, and what it has printed so far."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        """What it printed, on either stream."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, words: str, deadline_s: float = 90.0) -> None:
        """Wait until it has printed ``words``."""
        self._wait(lambda: words in self.said, f"say {words!r}", deadline_s)

    def wait_to_be(self, command: str, deadline_s: float = 90.0) -> None:
        """Wait until the shell has done with all else and become ``command`` (exec)."""
        words = Path(f"/proc/{self.process.pid}/cmdline")
        wanted = command.replace(" ", "\0") + "\0"
        self._wait(lambda: words.read_text() == wanted, f"become {command!r}", deadline_s)

    def _wait(self, come: Callable[[], bool], what: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while True:
            ended = self.process.poll() is not None  # Read before the output, so that its last lines count.
            if come():
                return
            assert not ended, f"ended before it could {what}:\n{self.said}"
            assert time.monotonic() < end, f"did not {what}:\n{self.said}"
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Machine:
    """A host of the laboratory under another name; None is this machine itself."""

    host: Host | None
    name: str
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    resolver: Path | None = None

    def type(self, script: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Typed:
        """Begin to run ``script`` there, as a shell does."""
        whole = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)}
        # What `pip install` puts on a user's path.
        whole["PATH"] = f"{Path(sys.executable).parent}:{whole.get('PATH', '')}"
        whole |= {"PYTHONUNBUFFERED": "1", **self.env, **(env or {})}
        words = ["bash", "-c", script]
        if self.host is not None:
            whole["HOST"] = json.dumps([self.host.namespace, self.name, str(self.host.hosts_file)])
            words = [sys.executable, str(_COMMAND), *words]
        if self.resolver is not None:
            whole["RESOLVER"] = str(self.resolver)
        number = len(list(self.folder.glob(f"{self.name}-*.out")))
        output = self.folder / f"{self.name}-{number}.out"
        with output.open("wb") as written:
            process = subprocess.Popen(
                words,
                env=whole,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Typed(process, output)


def finish(begun: Sequence[Typed], deadline_s: float = 150.0) -> list[str]:
    """Wait for the good end of every command; return what each printed."""
    end = time.monotonic() + deadline_s
    for each in begun:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.1, end - time.monotonic()))
    codes = [each.process.poll() for each in begun]
    assert set(codes) == {0}, "\n".join(f"exit {code}\n{each.said}" for code, each in zip(codes, begun, strict=True))
    return [each.said for each in begun]


@contextlib.contextmanager
def typed(*begun: Typed) -> Iterator[tuple[Typed, ...]]:
    """Yield running commands; they are ended afterwards in any case."""
    try:
        yield begun
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for each in begun:
                if each.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.process.pid, number)
            for each in begun:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(15.0)
