"""Starting a job: watchdog, held signals and the first workers, before the agent imports anything slow.

The workers' interpreters start and import torch while the agent imports asyncio and the control plane.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .. import settings
from .._core import adopt_orphans
from ..environments.world import Address
from ..observe import stacks
from . import worker
from .exit_evidence import ExitEvidence
from .options import Job, UsageError, make_job, read_plain
from .termination import Watchdog, descendants

__all__ = [
    "ASYNC_ERROR_HANDLING",
    "ENDING_SIGNALS",
    "HANDLED_SIGNALS",
    "JOB_VARIABLE",
    "OUTER_LAUNCHER_VARIABLES",
    "PIPE_BYTES",
    "EarlyStart",
    "WorkerProcess",
    "open_pipe",
    "rank_variables",
    "reserve_port",
    "run_command_line",
    "run_job",
    "worker_environment",
]

# Descriptors that a worker costs the agent: two pipes, three memfds, two logs, a connection and its pidfd; and a few
# while it starts.
_FDS_PER_WORKER = 12

# The signals that end the job; and all that the agent handles in its event loop.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HANDLED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGTSTP)

# Unique to one agent, and inherited by every process that its workers start, whatever session or group that moves to.
JOB_VARIABLE = "ALLHANDS_COORDINATOR"

# Variables of an outer launcher that are wrong for the workers of this one.
OUTER_LAUNCHER_VARIABLES = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "ALLHANDS_RECORDER_FD",
    "ALLHANDS_NODE_ADDRESS",
    "ALLHANDS_TOKEN_FILE",
)

# torchrun's default.
ASYNC_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")

# The largest pipe that Linux allows ordinary users, so that a worker rarely blocks on its output.
PIPE_BYTES = 1 << 20

# Time for the signal handler to write the stacks of every thread, on a busy machine.
_STACKS_S = 1.5

# The directory that the package was imported from, for the workers' interpreters.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # noqa: PTH120


def run_command_line(line: Sequence[str]) -> int | None:
    """Run the job that the words after `allhands run` describe; None where click must read or refuse them."""
    found = read_plain(line, os.environ)
    if found is None:
        return None
    try:
        job = make_job(*found)
    except UsageError:
        return None
    return run_job(job)


def run_job(job: Job) -> int:
    """Run the agent of ``job`` on this node to the end of the job; return the exit status."""
    early = EarlyStart(job)
    try:
        # Slow to import; on one node the workers are running by now.
        from .agent import main

        return main(job, early)
    finally:
        early.close()


class EarlyStart:
    """The watchdog, the signals that arrive before the event loop, and the first workers of a job on one node."""

    def __init__(self, job: Job) -> None:
        # The abstract Unix socket where the workers find the coordinator; identifies the job's processes on this node.
        self.socket_name = f"allhands-{os.urandom(8).hex()}"
        self.token = settings.read().token or os.urandom(16).hex()
        # On one node: reserves the port in MASTER_PORT, unless the user named one.
        self.port: socket.socket | None = None
        self.workers: list[WorkerProcess] = []
        # The agent's ends of stdout and stderr, by local rank.
        self.output_pipes: list[tuple[int, int]] = []
        # The agent's end of rank 0's stdin; None where rank 0 reads the agent's stdin itself, or runs on another node.
        self.stdin_pipe: int | None = None
        self.pending_signals: list[int] = []
        _raise_descriptor_limit(job)
        # A shell that this process replaced by exec may have left its children, which are not the job's.
        foreign = descendants(os.getpid())
        adopt_orphans()
        for number in HANDLED_SIGNALS:
            # nohup, and shells that start the agent in the background, set SIG_IGN.
            if number not in ENDING_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self.pending_signals.append(number))
        self.watchdog = Watchdog(JOB_VARIABLE, f"unix:{self.socket_name}")
        self.excluded_pids = {self.watchdog.pid, *foreign}
        try:
            # Agents of several nodes meet first; log files are opened by the agent, which reports a full disk.
            if job.nodes == 1 and not any(map(any, job.streams)):
                master = job.master
                if master is None:
                    self.port = reserve_port("127.0.0.1")
                    master = Address(*self.port.getsockname())
                self.start_workers(
                    job,
                    0,
                    token=self.token,
                    master=master,
                    address="",
                    open_output=self._open_output,
                )
        except BaseException:
            self.close()
            raise

    def _open_output(self, _: int) -> tuple[int, int]:
        stdout, stderr = open_pipe(), open_pipe()
        self.output_pipes.append((stdout[0], stderr[0]))
        return stdout[1], stderr[1]

    def start_workers(
        self,
        job: Job,
        attempt: int,
        *,
        token: str,
        master: Address,
        address: str,
        open_output: Callable[[int], tuple[int, int]],
    ) -> None:
        """Start the workers of an attempt on this node; ``open_output`` returns stdout and stderr of a local rank."""
        # Each is in the list as soon as it runs, so that `close` kills it where another one cannot be started.
        self.workers, self.stdin_pipe = [], None
        for local_rank in range(job.local_world_size):
            environment = worker_environment(
                job,
                local_rank,
                attempt,
                coordinator=f"unix:{self.socket_name}",
                token=token,
                master=master,
                address=address,
                environment=os.environ,
            )
            stdout, stderr = open_output(local_rank)
            stdin = None
            try:
                if job.rank(local_rank) == 0:
                    stdin, self.stdin_pipe = _open_stdin()
                else:
                    stdin = os.open(os.devnull, os.O_RDONLY)
                worker = WorkerProcess(job, local_rank, environment, stdin=stdin, stdout=stdout, stderr=stderr)
                self.workers.append(worker)
            finally:
                # 0 is the agent's own stdin, which rank 0 may share.
                for descriptor in (stdin, stdout, stderr):
                    if descriptor:
                        os.close(descriptor)

    def close(self) -> None:
        """Dismiss the watchdog; kill workers that still run after a failed start."""
        for each in self.workers:
            if each.alive:
                each.signal_group(signal.SIGKILL)
        self.watchdog.dismiss()


def _raise_descriptor_limit(job: Job) -> None:
    need = _FDS_PER_WORKER * job.local_world_size + 2 * job.world_size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        from ..errors import fail

        raise fail(
            "fd-limit",
            f"too few file descriptors for {job.local_world_size} ranks on this node",
            who=f"the launcher (pid {os.getpid()})",
            why=f"it needs {need}, the limit is {hard}",
            fix="raise the limit before the job starts: ulimit -n 65536 (and LimitNOFILE= in a service)",
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


# Workers ----------------------------------------------------------------------------------------------------------


class WorkerProcess(ExitEvidence):
    """One worker as the agent sees it."""

    def __init__(
        self, job: Job, local_rank: int, environment: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
    ) -> None:
        super().__init__(job.rank(local_rank))
        task = worker.encode_task(
            job.kind,
            agent=os.getpid(),
            record=self._record,
            fatal=self._fatal,
            recorder=self._recorder,
            init=job.init,
        )
        # -u as torchrun: a line appears when it is printed, and none is lost in a crash.
        self._popen = subprocess.Popen(
            [sys.executable, "-u", "-c", worker.PROGRAM, _PACKAGE, task, job.target, *job.arguments],
            env=dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(self._record, self._fatal, self._recorder),
            # A process group to signal, and a session: Linux's autogroup scheduler divides the cores by session, and
            # ranks that share one start half as fast beside other jobs.
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.started_s = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet."""
        return self.status is None

    def reaped(self, status: int) -> None:
        """Record its end; ``status`` is an exit status, or the negative of a signal."""
        self.status = self._popen.returncode = status
        self.ended_s = time.monotonic()

    def end(self, number: int) -> None:
        """Send a signal that should end it to its process group, and note it as the launcher's."""
        if self.alive:
            self._note_signal(number)
        self.signal_group(number)

    def signal_group(self, number: int) -> None:
        """Send any signal to its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stacks(self) -> str:
        """Return the stacks of all threads; "" where it does not write them in time. Blocks."""
        return stacks.request(self.pid, _STACKS_S)

    def state(self) -> str:
        """Return the kernel's state of it (running, sleeping, stopped); "" where it is gone."""
        import psutil  # slow

        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return ""


def _open_stdin() -> tuple[int, int | None]:
    """Return rank 0's stdin, and the agent's end where that is a terminal; a pipe or a file is passed to rank 0."""
    try:
        os.fstat(0)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY), None
    if not os.isatty(0):
        return 0, None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return reader, writer


def open_pipe() -> tuple[int, int]:
    """Open a pipe for a worker's output; return the agent's end, which is non-blocking, and the worker's."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(OSError):  # the user's limit of pipe pages is reached: the pipe stays smaller
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of ``host``; as it does not listen, rank 0 can bind the port too."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def worker_environment(
    job: Job,
    local_rank: int,
    attempt: int,
    *,
    coordinator: str,
    token: str,
    master: Address,
    address: str = "",
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a worker: torchrun's variables and those that `environments` reads.

    TORCHELASTIC_USE_AGENT_STORE is removed: with it, torch would expect the launcher to serve a store at MASTER_PORT.
    """
    found = {name: value for name, value in environment.items() if name not in OUTER_LAUNCHER_VARIABLES}
    found |= rank_variables(job, local_rank, attempt, coordinator=coordinator, token=token, master=master)
    found |= {
        "TORCHELASTIC_RUN_ID": job.name,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
    }
    found.setdefault(*ASYNC_ERROR_HANDLING)
    if address:
        found["ALLHANDS_NODE_ADDRESS"] = address
    if job.local_world_size > 1:
        # As torchrun: otherwise each rank starts a thread for every core.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def rank_variables(
    job: Job, local_rank: int, attempt: int, *, coordinator: str, token: str, master: Address
) -> dict[str, str]:
    """Return the variables that differ between ranks, jobs and attempts, without those of torch's elastic agent."""
    place = {
        "RANK": str(job.rank(local_rank)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
    }
    ours = {f"ALLHANDS_{name}": value for name, value in place.items()}
    return {
        **place,
        **ours,
        "GROUP_RANK": str(job.node_rank),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "ROLE_NAME": job.role,
        "ROLE_RANK": place["RANK"],
        "ROLE_WORLD_SIZE": place["WORLD_SIZE"],
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "ALLHANDS_NODE_RANK": str(job.node_rank),
        "ALLHANDS_JOB": job.name,
        "ALLHANDS_ATTEMPT": str(attempt),
        "ALLHANDS_RESTART": str(attempt),
        "ALLHANDS_TOKEN": token,
        JOB_VARIABLE: coordinator,
    }
