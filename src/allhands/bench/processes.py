"""The rank processes of a bench: start (by mpirun where MPI takes part), messages, and their end in every case.

Rank 0 sends JSON objects and waits for a reply to each, so that nothing is measured while the command draws
its progress. If the connection of a rank to the command breaks, the command is gone, and the rank exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

from ..errors import AllhandsError, fail
from ..settings import LAUNCHER_TABLE
from .config import CollectiveConfig, DdpConfig, RollCallConfig, missing_mpi

__all__ = ["CommandConnection", "RankProcesses", "cores", "network", "serve", "short_path"]

# The file of the plan in the folder of the command.
_PLAN = "plan"

# Rank 0 sends a message after each round of a size, which takes seconds at most; the import of torch on a busy machine
# takes longer.
_SILENCE_S = 150.0

# After the first rank has ended the others have this long to print what they saw.
_LAST_OUTPUT_S = 1.5

# How long ranks that are done, or mpirun after SIGTERM, may take on a busy machine before they are killed.
_END_S = 15.0

_MEMORY = Path("/dev/shm")  # noqa: S108  # not for a file of a known name

# How many lines of each rank's output are shown after a failure.
_LINES = 15

# Settings of Open MPI 4 (OMPI_) and 5 (PRTE_ for its launcher); other MPIs ignore them. Containers often have no user
# but root, and mpirun runs our own program only. By default it starts no more ranks than cores and binds them to cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

# Variables of a rank of some other job; Open MPI's settings (OMPI_MCA_*) and ours are kept.
_OTHER_LAUNCHERS = ("SLURM_", "PMI", "OMPI_COMM_", "PBS_", "LSB_", "FLUX_", "TORCHELASTIC_", "HYDRA_")
_OTHER_JOB = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *LAUNCHER_TABLE,
    *("ALLHANDS_ATTEMPT", "ALLHANDS_BIND"),
}


def cores() -> int:
    """Return the number of cores that this process, and so the ranks, may use."""
    return len(os.sched_getaffinity(0))


class RankProcesses:
    """The ranks of one plan while a block runs; nothing of them is left when it ends."""

    def __init__(self, plan: CollectiveConfig | DdpConfig | RollCallConfig, program: str = "collective_rank") -> None:
        self._plan = plan
        # The module of this package whose `main` is a rank.
        self._program = program
        self._silence_s = _SILENCE_S
        # MPI's shared memory is in this folder too, so that it is removed however mpirun ends.
        memory = str(_MEMORY) if plan.needs_mpirun and os.access(_MEMORY, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"allhands-bench-{os.getpid()}-", dir=memory))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The pid of each rank that has connected.
        self.pids: dict[int, int] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        # The rank of each connection; -1 until its first message.
        self._ranks: dict[Connection, int] = {}
        self._done: set[int] = set()
        self._network = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            with short_path(self._folder) as place:
                self._listener.bind(f"{place}/socket")
            self._listener.listen(self._plan.ranks)
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # Start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        (self._folder / _PLAN).write_bytes(msgspec.json.encode(self._plan))
        # The package's path is appended and -P is given, so that no module beside the user's script shadows another.
        code = "import sys; sys.path.append(sys.argv.pop(1)); from allhands.bench.{} import main; main()"
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-P", "-c", code.format(self._program), root, str(self._folder)]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OTHER_LAUNCHERS) and name not in _OTHER_JOB
        }
        environment |= {"OMP_NUM_THREADS": "1", "ALLHANDS_JOB": self._folder.name}
        if self._plan.needs_mpirun:
            environment |= _OPEN_MPI
            # The folder of its session, and the memory that its ranks share (vader in Open MPI 4, sm in 5).
            environment["TMPDIR"] = str(self._folder)
            if self._folder.is_relative_to(_MEMORY):
                for engine in ("vader", "sm"):
                    environment.setdefault(f"OMPI_MCA_btl_{engine}_backing_directory", str(self._folder))
            # Open MPI counts hardware cores, which need not be those that it may use; it is fastest if it yields only
            # where there are more ranks than cores.
            environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1" if self._plan.ranks > cores() else "0")
            self._spawn("mpirun", ["mpirun", "-n", str(self._plan.ranks), *command, "-1"], environment)
            return
        calls = [(f"rank {rank}", [*command, str(rank)], environment) for rank in range(self._plan.ranks)]
        if isinstance(self._plan, CollectiveConfig) and self._plan.hosts > 1:
            environment |= {"MASTER_ADDR": _address(0), "MASTER_PORT": str(_PORT)}
            environment.setdefault("ALLHANDS_TOKEN", secrets.token_hex(16))
            hosts = self._network.enter_context(network(self._plan.hosts))
            for rank, call in enumerate(calls):
                hosts[self._plan.host(rank)].submit(self._spawn, *call).result()
        else:
            for call in calls:
                self._spawn(*call)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self._folder / name).open("wb") as printed:
            self._processes[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the command, which ends them in order.
                start_new_session=True,
            )

    # Messages ---------------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of rank 0 until all ranks are done; raise engine-failed if a rank dies or all are silent.

        Rank 0 continues when the caller asks for the next message.
        """
        heard = time.monotonic()
        while len(self._done) < self._plan.ranks:
            if time.monotonic() - heard > self._silence_s:
                raise self._failed(f"nothing was heard for {self._silence_s:.0f} s", hung=True)
            for ready in wait([self._listener, *self._ranks], 0.5):
                if not isinstance(ready, Connection):
                    self._ranks[Connection(self._listener.accept()[0].detach())] = -1
                    continue
                message = self._receive(ready)
                heard = time.monotonic()
                if "size" in message:
                    yield message
                    with contextlib.suppress(OSError):  # It died; the next read reports that.
                        ready.send_bytes(b".")
            # A process that ends before its rank has connected closes no connection.
            for process in self._processes.values():
                if process.poll() is not None and len(self.pids) < self._plan.ranks:
                    raise self._failed(f"a process ended with status {process.returncode} before all ranks had begun")

    def _receive(self, connection: Connection) -> dict[str, Any]:
        """Return the next message of one rank; {} at the end of a rank that is done."""
        try:
            message: dict[str, Any] = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            connection.close()
            rank = self._ranks.pop(connection)
            if rank not in self._done:
                raise self._failed(f"rank {rank} ended" if rank >= 0 else "a rank ended before it began") from None
            return {}
        if "pid" in message:
            self._ranks[connection] = message["rank"]
            self.pids[message["rank"]] = message["pid"]
        if "done" in message:
            self._done.add(message["rank"])
        if "failed" in message:
            raise self._failed(f"rank {message['rank']} raised {message['failed'].splitlines()[0]}")
        return message

    # End --------------------------------------------------------------------------------------------------------

    def _failed(self, why: str, *, hung: bool = False) -> AllhandsError:
        if not hung:
            # The end of one rank makes the others fail; their output helps to tell which was first.
            deadline = time.monotonic() + _LAST_OUTPUT_S
            while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
                time.sleep(0.02)
        files = sorted(path for path in self._folder.iterdir() if path.is_file() and path.name != _PLAN)
        printed = {path.name: path.read_text(errors="replace").strip() for path in files}
        output = "".join(printed.values())
        if self._plan.needs_mpirun and not self.pids and "mpi4py" in output:
            return missing_mpi(_tail(output, 1))
        tails = [f"--- {name} printed:\n{_tail(text, _LINES)}" for name, text in printed.items() if text]
        return fail(
            "engine-failed",
            f"the bench of {self._plan.operation} did not come to its end: {why}",
            who="; ".join(f"{name} {_ending(process)}" for name, process in self._processes.items()),
            why="\n".join(tails) or "no rank printed anything",
            fix=self._plan.remedy,
        )

    def _end(self) -> None:
        deadline = time.monotonic() + _END_S
        mpi = self._plan.needs_mpirun
        for process in self._processes.values() if len(self._done) < self._plan.ranks else ():
            # mpirun ends its ranks; ranks that are done end by themselves.
            process.send_signal(signal.SIGTERM if mpi else signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        # mpirun's ranks are not our children: those that it left would continue.
        for pid in self.pids.values() if mpi else ():
            with contextlib.suppress(ProcessLookupError):  # it ended since it was looked at
                if _ours(pid, str(self._folder)):
                    os.kill(pid, signal.SIGKILL)
        for connection in self._ranks:
            connection.close()
        self._listener.close()
        self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _ending(process: subprocess.Popen[bytes]) -> str:
    if process.returncode is None:
        return f"(pid {process.pid}) was still running"
    if process.returncode < 0:
        return f"(pid {process.pid}) was ended by {signal.Signals(-process.returncode).name}"
    return f"(pid {process.pid}) ended with status {process.returncode}"


def _ours(pid: int, folder: str) -> bool:
    """Return whether ``pid`` is still a rank of the bench that owns ``folder``: pids are reused."""
    try:
        return folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield another path to ``folder``, short enough for the address of a socket in it: those end at 108 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# In a rank ---------------------------------------------------------------------------------------------------


class CommandConnection:
    """The connection to the command."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(Path(folder)) as place:
                connection.connect(f"{place}/socket")
        except OSError:
            self._alone()
        self._connection = Connection(connection.detach())
        self._answers = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # A command that is killed before it has read all messages resets the connection instead of closing it.
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self._connection.recv_bytes():
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
            self._connection.send_bytes(json.dumps(message).encode())
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
    line = CommandConnection(folder)
    try:
        plan = msgspec.json.decode(Path(folder, _PLAN).read_bytes(), type=kind)
        if mpi_rank is not None and rank < 0:
            rank = mpi_rank(plan)
            # Not through mpirun, which would mix the output of the ranks.
            with Path(folder, f"rank {rank}").open("ab") as printed:
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


# Network namespaces -----------------------------------------------------------------------------------------

# <linux/sched.h>; os.unshare is in the standard library from 3.12 on.
_CLONE_NEWNET = 0x40000000

# Any port: nothing else listens in a new namespace, and its addresses cannot be reached from outside.
_PORT = 29500


def _address(host: int) -> str:
    """Return the address of a host on the network that they share."""
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def network(hosts: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Make hosts on one network for a block: threads, each in a network namespace of its own.

    A process that a thread starts is in that thread's namespace. Raises namespaces-refused where they cannot be made.
    """
    if shutil.which("ip") is None:
        raise _refused("`ip` is not installed (apt-get install iproute2)")
    with contextlib.ExitStack() as stack:
        switch, *made = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(hosts + 1)]
        switch.submit(_unshare).result()
        switch.submit(_ip, "link add br0 type bridge", "link set br0 up").result()
        for number, host in enumerate(made):
            namespace = host.submit(_unshare).result()
            peer = f"link add port{number} type veth peer name eth0 netns {namespace}"
            switch.submit(_ip, peer, f"link set port{number} master br0 up").result()
            address = f"addr add {_address(number)}/24 dev eth0"
            host.submit(_ip, "link set lo up", address, "link set eth0 up").result()
        yield made


def _unshare() -> str:
    """Give this thread a network namespace of its own; return its path."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise _refused(f"the kernel says: {os.strerror(ctypes.get_errno())}")
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


def _ip(*lines: str) -> None:
    """Run `ip` in the namespace of this thread."""
    for line in lines:
        done = subprocess.run(
            ["ip", *line.split()],  # noqa: S607  # whichever is on PATH
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise _refused(f"ip {line}: {done.stderr.strip()}")


def _refused(why: str) -> AllhandsError:
    return fail(
        "namespaces-refused",
        "--hosts needs network namespaces as hosts, and they cannot be made here",
        who=f"allhands bench (pid {os.getpid()}, user {os.getuid()})",
        why=why,
        fix="run it as root, or in a namespace of its own: `unshare --user --map-root-user --net allhands bench ...`; "
        "or measure without --hosts",
    )
