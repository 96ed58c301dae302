"""The processes of a bench: started, by mpirun where MPI takes part, listened to, and ended in every case."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from ..errors import AllhandsError, fail
from .config import CollectiveConfig, DdpConfig, missing_mpi

__all__ = ["Network", "RankProcesses", "cores", "short_path"]

# Found where this process found the package, as for the coordinator's own process.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from allhands.bench.{} import main; main()"

# Rank 0 speaks after each round of a size, which takes seconds at most; importing torch on a busy machine, most.
_SILENCE_S = 150.0

# After the first rank has gone the others are given this long to say what they saw.
_LAST_WORDS_S = 1.5

# How long ranks that are done, or mpirun that was asked to end them, may take on a busy machine before they are killed.
_END_S = 15.0

_MEMORY = Path("/dev/shm")  # noqa: S108  # not for a file of a known name

# How much of what each rank printed is shown when something went wrong.
_LINES = 15

# Variables that say who a process is in some other job; Open MPI's settings (OMPI_MCA_*) and ours are kept.
_STRANGERS = ("SLURM_", "PMI", "OMPI_COMM_", "PBS_", "LSB_", "FLUX_", "TORCHELASTIC_", "HYDRA_")
_OTHER_JOB = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *(f"ALLHANDS_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")),
    *("ALLHANDS_COORDINATOR", "ALLHANDS_ATTEMPT", "ALLHANDS_BIND"),
}


def cores() -> int:
    """Return on how many cores this process, and so the ranks, may run."""
    return len(os.sched_getaffinity(0))


class RankProcesses:
    """The ranks of one plan while a block runs. Nothing of them is left when it ends."""

    def __init__(
        self, plan: CollectiveConfig | DdpConfig, silence_s: float = _SILENCE_S, program: str = "rank"
    ) -> None:
        self._plan = plan
        # The module of this package whose `main` is a rank.
        self._program = program
        self._silence_s = silence_s
        # MPI's shared memory goes into this folder too, so it must be memory: and goes with it, however mpirun ends.
        memory = str(_MEMORY) if _needs_mpirun(plan) and os.access(_MEMORY, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"allhands-bench-{os.getpid()}-", dir=memory))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._unread: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._done: set[int] = set()
        self._network: Network | None = None

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that has come so far."""
        return dict(self._pids)

    def __enter__(self) -> Self:
        try:
            with short_path(self._folder) as place:
                self._listener.bind(f"{place}/socket")
            self._listener.listen(self._plan.ranks)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    # Starting ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        order = msgspec.json.encode(self._plan).decode()
        words = [
            sys.executable,
            "-P",
            "-c",
            _PROGRAM.format(self._program),
            root,
            str(self._folder / "socket"),
            str(self._folder),
            order,
        ]
        environment = _environment(self._folder.name)
        if _needs_mpirun(self._plan):
            # The folder of its session, and the memory that its ranks share (Open MPI 4 and 5 call it differently).
            environment["TMPDIR"] = str(self._folder)
            if self._folder.is_relative_to(_MEMORY):
                for engine in ("vader", "sm"):
                    environment.setdefault(f"OMPI_MCA_btl_{engine}_backing_directory", str(self._folder))
            self._spawn("mpirun", [*_mpirun(self._plan.ranks, environment), *words, "-1"], environment)
            return
        if isinstance(self._plan, CollectiveConfig) and self._plan.hosts > 1:
            self._start_on_hosts(self._plan, words, environment)
            return
        for rank in range(self._plan.ranks):
            self._spawn(str(rank), [*words, str(rank)], environment)

    def _start_on_hosts(self, plan: CollectiveConfig, words: list[str], environment: dict[str, str]) -> None:
        environment |= {"MASTER_ADDR": _address(0), "MASTER_PORT": str(_PORT)}
        environment.setdefault("ALLHANDS_TOKEN", secrets.token_hex(16))
        self._network = Network(plan.hosts).__enter__()
        for rank in range(plan.ranks):
            start = functools.partial(self._spawn, str(rank), [*words, str(rank)], environment)
            self._network.within(plan.host(rank), start)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self._folder / name).open("wb") as printed:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for the command, which ends them in order.
                    start_new_session=True,
                )
            )

    # Listening --------------------------------------------------------------------------------------------------

    def words(self) -> Iterator[dict[str, Any]]:
        """Yield what rank 0 says until all ranks are done; raises engine-failed where a rank dies or all are silent.

        Rank 0 goes on measuring when the caller asks for the next.
        """
        heard = time.monotonic()
        while len(self._done) < self._plan.ranks:
            if time.monotonic() - heard > self._silence_s:
                raise self._failed(f"nothing was heard for {self._silence_s:.0f} s", hung=True)
            for connection, message in self._read(0.5):
                heard = time.monotonic()
                if "size" in message or "about" in message:
                    yield message
                    with contextlib.suppress(OSError):  # it died meanwhile, which shows at the next reading
                        connection.sendall(b".")
            self._look()

    def _read(self, patience_s: float) -> list[tuple[socket.socket, dict[str, Any]]]:
        found = []
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._unread[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj  # type: ignore[assignment]  # only sockets are registered
            try:
                data = connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(connection)
                connection.close()
                rank = self._ranks.get(connection, -1)
                if rank not in self._done:
                    raise self._failed(f"rank {rank} ended" if rank >= 0 else "a rank ended before it began")
                continue
            *lines, self._unread[connection] = (self._unread[connection] + data).split(b"\n")
            for text in lines:
                message = json.loads(text)
                self._note(connection, message)
                found.append((connection, message))
        return found

    def _note(self, connection: socket.socket, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._ranks[connection] = message["rank"]
            self._pids[message["rank"]] = message["pid"]
        if "done" in message:
            self._done.add(message["rank"])
        if "failed" in message:
            raise self._failed(f"rank {message['rank']} raised {message['failed'].splitlines()[0]}")

    def _look(self) -> None:
        """Raise where a process ended before its rank had connected: nothing else would tell of it."""
        for process in self._processes:
            if process.poll() is not None and len(self._ranks) < self._plan.ranks:
                raise self._failed(f"a process ended with status {process.returncode} before all ranks had begun")

    # Ending -----------------------------------------------------------------------------------------------------

    def _failed(self, why: str, *, hung: bool = False) -> AllhandsError:
        if not hung:
            # Whoever goes first tears the others along; what they print helps to tell who was first.
            deadline = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
                time.sleep(0.02)
        ends = [f"rank {number} {_ending(process)}" for number, process in enumerate(self._processes)]
        if _needs_mpirun(self._plan):
            ends = [f"mpirun {_ending(self._processes[0])}"]
        printed = {path.name: path.read_text(errors="replace") for path in self._papers()}
        if _needs_mpirun(self._plan) and not self._ranks and "mpi4py" in "".join(printed.values()):
            return missing_mpi(_tail("".join(printed.values()), 1))
        tails = [
            f"--- {name if name == 'mpirun' else f'rank {name}'} printed:\n{_tail(text, _LINES)}"
            for name, text in printed.items()
            if text.strip()
        ]
        return fail(
            "engine-failed",
            f"the bench of {self._plan.operation} did not come to its end: {why}",
            who="; ".join(ends),
            why="\n".join(tails) or "no rank printed anything",
            fix="mend what the ranks say above; or measure fewer --ranks, smaller --sizes, or --against fewer peers",
        )

    def _papers(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.is_file())

    def _end(self) -> None:
        orderly = len(self._done) == self._plan.ranks
        deadline = time.monotonic() + _END_S
        mpi = _needs_mpirun(self._plan)
        for process in self._processes:
            # mpirun ends its ranks; those that are done end by themselves.
            if mpi and not orderly:
                process.terminate()
            elif not orderly:
                process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        # mpirun's ranks are not our children: those that it left would run on.
        for pid in self._pids.values() if mpi else ():
            with contextlib.suppress(ProcessLookupError):  # it ended since it was looked at
                if _ours(pid, str(self._folder)):
                    os.kill(pid, signal.SIGKILL)
        for connection in self._unread:
            connection.close()
        self._listener.close()
        self._selector.close()
        if self._network is not None:
            self._network.__exit__(None, None, None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(job: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_STRANGERS) and name not in _OTHER_JOB
    }
    return {**kept, "OMP_NUM_THREADS": "1", "ALLHANDS_JOB": job}


def _needs_mpirun(plan: CollectiveConfig | DdpConfig) -> bool:
    return isinstance(plan, CollectiveConfig) and plan.needs_mpirun


def _mpirun(ranks: int, environment: dict[str, str]) -> list[str]:
    """Return the beginning of the command line, and put what Open MPI wants into ``environment``."""
    about = subprocess.run(
        ["mpirun", "--version"],  # noqa: S607  # whichever is on PATH
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env=environment,
    )
    if "Open MPI" not in about.stdout + about.stderr and "OpenRTE" not in about.stdout + about.stderr:
        return ["mpirun", "-n", str(ranks)]
    # Containers have no other user; what runs is our own program.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # It counts hardware cores, which need not be those it may use; its best is to give cores away only if ranks
    # outnumber them.
    environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1" if ranks > cores() else "0")
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def _ending(process: subprocess.Popen[bytes]) -> str:
    if process.returncode is None:
        return f"(pid {process.pid}) was still running"
    if process.returncode < 0:
        return f"(pid {process.pid}) was ended by {signal.Signals(-process.returncode).name}"
    return f"(pid {process.pid}) ended with status {process.returncode}"


def _ours(pid: int, folder: str) -> bool:
    """Tell whether ``pid`` is a rank of the crew whose folder this is: numbers are given out again."""
    try:
        return folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield another path to ``folder``, short enough for the address of a socket in it: those end at 108 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# Network namespaces -----------------------------------------------------------------------------------------

# <linux/sched.h>; the standard library has it from 3.12 on.
_CLONE_NEWNET = 0x40000000

# Any will do: nothing else listens in a namespace that was just made, and nobody outside sees its addresses.
_PORT = 29500

_T = TypeVar("_T")


def _address(host: int) -> str:
    """Return the address of a host on the network that they share."""
    return f"10.77.0.{host + 1}"


class Network:
    """Hosts while a block runs. Raises namespaces-refused where they cannot be made."""

    def __init__(self, hosts: int) -> None:
        self._number = hosts
        self._hosts: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._forget()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise _refused("`ip` is not installed (apt-get install iproute2)")
        switch = self._namespace()
        self._hosts.append(switch)
        self._ip(switch, "link add br0 type bridge", "link set br0 up")
        for number in range(self._number):
            host = self._namespace()
            self._hosts.append(host)
            self._ip(
                switch,
                f"link add port{number} type veth peer name eth0 netns /proc/self/fd/{host}",
                f"link set port{number} master br0 up",
            )
            self._ip(host, "link set lo up", f"addr add {_address(number)}/24 dev eth0", "link set eth0 up")

    def within(self, host: int, make: Callable[[], _T]) -> _T:
        """Return what ``make`` returns on a host; a process that it starts stays there."""
        return _within(self._hosts[1 + host], make)

    def _namespace(self) -> int:
        def make() -> int:
            _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        return _aside(make)

    def _ip(self, namespace: int, *lines: str) -> None:
        for line in lines:
            done = _within(
                namespace,
                lambda line=line: subprocess.run(  # type: ignore[misc]  # a default that mypy does not see through
                    ["ip", *line.split()],  # noqa: S607  # whichever is on PATH
                    capture_output=True,
                    text=True,
                    check=False,
                    pass_fds=self._hosts,
                ),
            )
            if done.returncode:
                raise _refused(f"ip {line}: {done.stderr.strip()}")

    def _forget(self) -> None:
        while self._hosts:
            os.close(self._hosts.pop())


def _within(namespace: int, make: Callable[[], _T]) -> _T:
    def enter() -> _T:
        _check(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET))
        return make()

    return _aside(enter)


def _aside(make: Callable[[], _T]) -> _T:
    """Return what ``make`` returns in a thread of its own, which is the only one that moves."""
    made: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for problem in problems:
        raise problem
    return made[0]


def _check(code: int) -> None:
    if code:
        raise _refused(f"the kernel says: {os.strerror(ctypes.get_errno())}")


def _refused(why: str) -> AllhandsError:
    return fail(
        "namespaces-refused",
        "--hosts needs network namespaces as hosts, and they cannot be made here",
        who=f"allhands bench (pid {os.getpid()}, user {os.getuid()})",
        why=why,
        fix="run it as root, or in a namespace of its own: `unshare --user --map-root-user --net allhands bench ...`; "
        "or measure without --hosts",
    )
