"""Real processes as ranks: start one script once per rank, watch it, and end it at a hard deadline.

Importing torch takes longer than most tests, so ranks are forked from a fork server: a process that has imported
torch and allhands and formed nothing. A rank then runs its script at the top level of its own interpreter, so
that uncaught exceptions, exit handlers and signals take their usual way. ``fresh=True`` starts a new interpreter
instead, for tests that are about just that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import leaks

__all__ = ["Job", "Result", "complaints", "free_port", "ipv6", "launch", "start", "well"]

TESTS = Path(__file__).resolve().parents[1]

# The first line of every script; what the test wrote begins on the second.
PRELUDE = "from ranks.rank_namespace import *\n"

# Every rank of a test ends by itself long before this; a hang is a failure of the test, not of the machine.
DEADLINE_S = 60.0

# Time by which a process of a rank (its coordinator) may outlive it: it first notifies the other ranks.
AFTERLIFE_S = 5.0

# Variables of the environment of the tests must not determine the ranks' identity.
STRANGERS = ("ALLHANDS_", "GLOO_", "NCCL_", "SLURM_", "OMPI_", "PMI", "PBS_", "LSB_", "FLUX_", "TORCHELASTIC_")
PLAIN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}

# Range of free ports: below those that Linux gives to connections (from 32768). PORTS for each of WORKERS
# processes of pytest; each starts at a random one of its own, for other runs on this machine.
FIRST_PORT, PORTS, WORKERS = 10_000, 2_500, 8
_PORTS = itertools.count(secrets.randbelow(PORTS))

WAITING = re.compile(r"allhands rank \d+: .*waiting for rank")


@dataclass(frozen=True, slots=True)
class Result:
    """How one rank ended. A negative return code is the signal that ended it."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the rank reported with `say`, in order."""
        return parse(self.stdout)

    @property
    def complaints(self) -> str:
        """Its stderr without the lines about ranks that a roll call waits for, which depend on the load."""
        return complaints(self.stderr)

    def __getitem__(self, key: str) -> Any:
        """Return the last value that the rank reported as ``key``."""
        for line in reversed(self.lines):
            if key in line:
                return line[key]
        raise KeyError(f"rank {self.rank} never said {key!r}; stdout:\n{self.stdout}\nstderr:\n{self.stderr}")


def complaints(text: str) -> str:
    """Return ``text`` without the lines about ranks that a roll call waits for."""
    return "".join(line for line in text.splitlines(keepends=True) if not WAITING.match(line))


def parse(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines of ``text``."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


@dataclass(slots=True)
class Rank:
    """One started process."""

    number: int
    pid: int
    stdout: Path
    stderr: Path
    started: float
    popen: subprocess.Popen[bytes] | None = None
    returncode: int | None = None
    ended: float = 0.0

    def said(self) -> list[dict[str, Any]]:
        """Return what it has reported so far."""
        return parse(self.stdout.read_text(errors="replace"))


@dataclass(slots=True)
class Job:
    """The ranks of one script while they run."""

    folder: Path
    deadline: float
    ranks: list[Rank] = field(default_factory=list)

    def wait_for(self, key: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Wait until each of ``ranks`` (all by default) reported ``key``; return the values."""
        wanted = list(range(len(self.ranks)) if ranks is None else ranks)
        while True:
            self.poll()
            found = {number: line[key] for number in wanted for line in self.ranks[number].said() if key in line}
            if len(found) == len(wanted):
                return found
            if any(self.ranks[number].returncode is not None for number in wanted if number not in found):
                # It may have reported between the check of its output and the check of its end.
                again = {n: line[key] for n in wanted for line in self.ranks[n].said() if key in line}
                if len(again) == len(wanted):
                    return again
                self.give_up(f"a rank ended before it said {key!r}")
            if time.monotonic() > self.deadline:
                self.give_up(f"nobody said {key!r}")
            time.sleep(0.005)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to one rank; return the wall clock of that moment."""
        at = time.time()
        os.kill(self.ranks[rank].pid, number)
        return at

    def poll(self) -> list[Rank]:
        """Record the ranks that have ended; return those that run."""
        for entry in self.ranks:
            if entry.returncode is None and entry.popen is not None:
                entry.returncode = entry.popen.poll()
                entry.ended = time.monotonic()
        if any(entry.popen is None and entry.returncode is None for entry in self.ranks):
            fork_server().poll(self.ranks)
        return [entry for entry in self.ranks if entry.returncode is None]

    def results(self) -> list[Result]:
        """Wait for all ranks to end; fail where one does not, or where something they started stays."""
        while self.poll():
            if time.monotonic() > self.deadline:
                self.give_up("still running at the deadline")
            time.sleep(0.005)
        self.nothing_stays()
        return [
            Result(
                entry.number,
                cast("int", entry.returncode),
                entry.stdout.read_text(errors="replace"),
                entry.stderr.read_text(errors="replace"),
                entry.ended - entry.started,
            )
            for entry in self.ranks
        ]

    def nothing_stays(self) -> None:
        """Fail if anything that a rank started is still there: each rank had a session of its own."""
        deadline = time.monotonic() + AFTERLIFE_S
        while found := self._stay():
            if time.monotonic() > deadline:
                words = "\n".join(f"  pid {pid}: {command}" for pid, command in found.items())
                self.give_up(f"left behind by the ranks:\n{words}")
            time.sleep(0.01)

    def _stay(self) -> dict[int, str]:
        sessions = {entry.pid for entry in self.ranks}
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(folder.name)
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                if session in sessions and leaks.alive(pid):
                    found[pid] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def give_up(self, why: str) -> NoReturn:
        """End everything this job started, and fail with all that is known."""
        self.poll()
        for entry in self.ranks:
            if entry.returncode is None:
                # The fork server made the stacks of all threads the answer to this signal.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGCONT)
                    os.kill(entry.pid, signal.SIGUSR1)
        time.sleep(0.3)
        states = [
            f"--- rank {entry.number} (pid {entry.pid}, returned {entry.returncode})\n"
            f"{entry.stdout.read_text(errors='replace')}\n{entry.stderr.read_text(errors='replace')}"
            for entry in self.ranks
        ]
        self.kill()
        raise AssertionError(f"{why}\n" + "\n".join(states))

    def kill(self) -> None:
        """End everything this job started."""
        for pid in [*self._stay(), *(entry.pid for entry in self.poll())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + AFTERLIFE_S
        while self.poll() and time.monotonic() < deadline:
            time.sleep(0.01)


def start(
    source: str,
    world_size: int,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = DEADLINE_S,
    each: Mapping[int, Mapping[str, str]] | None = None,
    fresh: bool = False,
    command: list[str] | None = None,
) -> Job:
    """Start ``source`` once per rank; ``env`` is for all, ``each`` for single ranks.

    ``command`` runs the script by something else than the interpreter (torchrun), once.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    gates = folder / "gates"
    gates.mkdir()
    script = folder / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(source).lstrip("\n"))
    job = Job(folder, time.monotonic() + timeout)
    for number in range(world_size):
        entry = {
            **(env or {}),
            **((each or {}).get(number, {})),
            "RANKNO": str(number),
            "RANKS": str(world_size),
            "GATES": str(gates),
        }
        if fresh or command is not None:
            job.ranks.append(_interpreter(script, number, entry, command))
        else:
            job.ranks.append(fork_server().fork(script, number, entry))
    return job


def launch(source: str, world_size: int, env: Mapping[str, str] | None = None, **kw: Any) -> list[Result]:
    """Run ``source`` once per rank to the end; the arguments are those of `start`."""
    with running(source, world_size, env, **kw) as job:
        return job.results()


@contextlib.contextmanager
def running(source: str, world_size: int, env: Mapping[str, str] | None = None, **kw: Any) -> Iterator[Job]:
    """Start ``source`` for the length of a block; whatever still runs at its end is killed."""
    job = start(source, world_size, env, **kw)
    try:
        yield job
    finally:
        job.kill()
        shutil.rmtree(job.folder)


def well(results: list[Result]) -> list[Result]:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"
    return results


def ipv6() -> bool:
    """Tell whether this machine has an IPv6 loopback."""
    try:
        return bool(free_port("::1"))
    except OSError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which no process listens, and which neither the kernel nor another test uses meanwhile."""
    while True:
        port = _first_port() + next(_PORTS) % PORTS
        with (
            socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe,
            contextlib.suppress(OSError),  # in use: try the next one
        ):
            probe.bind((host, port))
            return port


def _first_port() -> int:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return FIRST_PORT + int(worker) % WORKERS * PORTS


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without variables of rank and launcher, with ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(STRANGERS) and name not in PLAIN}
    paths = [str(TESTS), *filter(None, [kept.get("PYTHONPATH", "")])]
    # One thread each: all ranks and other processes share two cores.
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **extra}


def _interpreter(script: Path, number: int, env: Mapping[str, str], command: list[str] | None) -> Rank:
    begin = command if command is not None else [sys.executable]
    stdout, stderr = script.with_name(f"{number}.out"), script.with_name(f"{number}.err")
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            [*begin, str(script)],
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return Rank(number, process.pid, stdout, stderr, time.monotonic(), popen=process)


# The fork server, seen from the test ----------------------------------------------------------------------------


class ForkServer:
    """The process that forks ranks: it reads a JSON line per rank and writes one for each start and end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env=environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ended: dict[int, tuple[int, float]] = {}
        self._buffer = b""
        self._read(block=True)  # its first line: it is ready

    def fork(self, script: Path, number: int, env: Mapping[str, str]) -> Rank:
        """Start one rank."""
        stdout, stderr = script.with_name(f"{number}.out"), script.with_name(f"{number}.err")
        order = {"script": str(script), "env": dict(env), "stdout": str(stdout), "stderr": str(stderr)}
        assert self.process.stdin is not None
        stdout.touch()
        stderr.touch()
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        while True:
            for line in self._read(block=True):
                if "pid" in line:
                    return Rank(number, line["pid"], stdout, stderr, time.monotonic())

    def poll(self, ranks: list[Rank]) -> None:
        """Note which of ``ranks`` have ended."""
        self._read(block=False)
        for entry in ranks:
            if entry.popen is None and entry.returncode is None and entry.pid in self._ended:
                entry.returncode, entry.ended = self._ended.pop(entry.pid)

    def end(self) -> None:
        """End it, and with it every rank that is left."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _read(self, *, block: bool) -> list[dict[str, Any]]:
        assert self.process.stdout is not None
        found: list[dict[str, Any]] = []
        while True:
            ready, _, _ = select.select([self.process.stdout], [], [], 60.0 if block and not found else 0.0)
            if not ready and block and not found:
                raise RuntimeError("the fork server has not answered for a minute")
            if not ready:
                return found
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the fork server is gone")
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ended" in message:
                    self._ended[message["ended"]] = (message["code"], time.monotonic())
                else:
                    found.append(message)


_fork_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the fork server, started at its first use."""
    global _fork_server  # noqa: PLW0603  # one for all tests; that it is shared is its point
    if _fork_server is None:
        _fork_server = ForkServer()
    return _fork_server


def end_fork_server() -> None:
    """End the fork server, if there is one."""
    global _fork_server  # noqa: PLW0603
    if _fork_server is not None:
        _fork_server.end()
        _fork_server = None


# The fork server itself -----------------------------------------------------------------------------------------


def _tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _serve() -> dict[str, Any]:
    """Fork a child per order. Returns in the children only, each with its order."""
    pidfds: dict[int, int] = {}
    buffer = b""
    _tell(ready=True)
    while True:
        ready, _, _ = select.select([0, *pidfds], [], [])
        for pidfd in ready:
            if pidfd:
                pid = pidfds.pop(pidfd)
                os.close(pidfd)
                _tell(ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            for pid in pidfds.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sys.exit()
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if not pid:
                for pidfd in pidfds:
                    os.close(pidfd)
                return order
            pidfds[os.pidfd_open(pid)] = pid
            _tell(pid=pid)


def _become(order: dict[str, Any]) -> types.ModuleType:
    """Turn a fresh child into the rank: its own session, output, environment and main module."""
    os.setsid()
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["stdout"], os.O_WRONLY | os.O_APPEND),
        (2, order["stderr"], os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(order["env"])
    sys.argv = [order["script"]]
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    module = types.ModuleType("__main__")
    module.__file__ = order["script"]
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    for needed in ("torch.nn.parallel", "torch.utils.data", "allhands.groups.lifecycle"):
        importlib.import_module(needed)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is there now is never looked at by a child's collector: half a second less at each child's end.
    gc.collect()
    gc.freeze()
    main = _become(_serve())
    # At the top level, so that an exception of the script reaches sys.excepthook.
    exec(compile(Path(main.__file__ or "").read_text(), main.__file__ or "", "exec"), main.__dict__)  # noqa: S102
