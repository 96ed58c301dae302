"""`allhands.spawn`: ranks as children of this process, with the signature of torch.multiprocessing.spawn."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ...environments.world import Address
from ...errors import AllhandsError, fail
from .. import termination
from ..exit_evidence import ExitEvidence, OomMonitor
from ..options import Job
from ..start import ASYNC_ERROR_HANDLING, JOB_VARIABLE, OUTER_LAUNCHER_VARIABLES, rank_variables, reserve_port
from ..termination import EXPLAIN_S, LEFTOVER_S, Termination
from ..verdict import judge, verdict_text
from .child import PROCESS_NAME, REENTERED_STATUS, ChildTask, InheritedFds, is_importing_main, run

if TYPE_CHECKING:
    from ..coordinator_host import CoordinatorThread

__all__ = ["SpawnContext", "spawn"]

_log = logging.getLogger("allhands")

# How often due signals and leftover processes are checked; the end of a child is seen at once.
_TICK_S = 0.02

# The time from SIGTERM to SIGKILL; the default of `allhands run --grace`.
_GRACE_S = 10.0

# A terminal's Ctrl-C is sent to the children too; one that is about to end is not interrupted a second time.
_INTERRUPT_S = 0.3

# How long the fork server may take to report the status of a process that ended, and how often it is polled.
_STATUS_S, _STATUS_POLL_S = 5.0, 0.002

# Contexts with running ranks, which a fork must not inherit.
_live: set[SpawnContext] = set()


def spawn(  # noqa: PLR0917  # torch's signature
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    results: bool = False,
) -> Any:
    """Run ``fn(rank, *args)`` in ``nprocs`` processes of this host, as torch.multiprocessing.spawn does.

    In ``fn``, `init_process_group()` needs no address, port, rank or size. Blocks until all ranks are done and returns
    None, or with ``results=True`` the list of their return values, by rank; with ``join=False`` returns a
    `SpawnContext` at once. Where a rank fails, the others are ended and SpawnRaised or SpawnExited is raised with its
    traceback and the list of consequential failures; its own exception is the ``__cause__`` where it can be pickled.
    Ctrl-C and the death of this process end all ranks. Raises ArgumentError, before a process is started, for a
    function that cannot run in another process.
    """
    if is_importing_main():
        raise _reentered()
    context = _checked_context(fn, nprocs, start_method, has_ranks=bool(_live))
    spawned = SpawnContext(fn, tuple(args), nprocs, daemon=daemon, context=context, results=results)
    if not join:
        return spawned
    while not spawned.join():
        pass
    return spawned.results if results else None


class SpawnContext:
    """The running ranks of `spawn`, with the interface of torch's ProcessContext, and their return values."""

    def __init__(
        self,
        fn: Callable[..., object],
        args: tuple[Any, ...],
        nprocs: int,
        *,
        daemon: bool,
        context: BaseContext,
        results: bool,
    ) -> None:
        self.processes: list[BaseProcess] = []
        self.results: list[Any] | None = None
        self._want_results, self._daemon = results, daemon
        self._name = f"allhands-{secrets.token_hex(8)}"
        self._ranks: list[_SpawnedRank] = []
        self._coordinator: CoordinatorThread | None = None
        self._error: AllhandsError | None = None
        self._over = False
        self._failed = False
        self._exiting = False
        self._leftovers: list[str] = []
        self._oom = OomMonitor()
        # Reserves the port in MASTER_PORT for torch's own env://.
        self._master = reserve_port("127.0.0.1")
        try:
            token = secrets.token_hex(16)
            for rank in range(nprocs):
                self._start(rank, Job(target="", name=self._name, local_world_size=nprocs), context, token, fn, args)
            _live.add(self)
            # After the children: they may be forks, and their interpreters start during this slow import.
            from ..coordinator_host import CoordinatorThread

            self._coordinator = CoordinatorThread(self._name, token)
        except BaseException:
            self._kill()
            self._close()
            raise
        self._at_exit = multiprocessing.util.Finalize(None, self._exit, exitpriority=50)

    def _start(  # noqa: PLR0917
        self, rank: int, job: Job, context: BaseContext, token: str, fn: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        environment = rank_variables(
            job, rank, 0, coordinator=f"unix:{self._name}", token=token, master=Address(*self._master.getsockname())
        )
        name, value = ASYNC_ERROR_HANDLING
        environment[name] = os.environ.get(name, value)
        spawned = _SpawnedRank(rank, self._name)
        self._ranks.append(spawned)
        in_main_thread = threading.current_thread() is threading.main_thread()
        task = ChildTask(
            rank=rank,
            parent=os.getpid(),
            direct=in_main_thread and context.get_start_method() != "forkserver",
            results=self._want_results,
            environment=environment,
            removed_variables=OUTER_LAUNCHER_VARIABLES,
            evidence=spawned.descriptors,
        )
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # each context has its own
            target=run, args=(task, fn, args), name=f"{PROCESS_NAME}{rank}", daemon=self._daemon
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError) as problem:
            # Pickling precedes the start; an error after the start is another one.
            if process.pid is not None:
                raise
            raise _unpicklable(problem, fn, args) from problem
        self.processes.append(process)
        spawned.started(process)

    # torch's ProcessContext --------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Return the pids of the ranks, in order."""
        return [each.pid for each in self._ranks]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a rank ends, at most ``timeout`` seconds; return whether all have.

        Where one failed, the others have ``grace_period`` (2 s) to report and exit by themselves, and as long (10 s)
        after SIGTERM until SIGKILL; then SpawnRaised or SpawnExited is raised.
        """
        if self._error is not None:
            raise self._error
        if self._over:
            return True
        try:
            self._wait(timeout)
            if any(each.failed for each in self._ranks):
                self._failed = True
                self._end(signal.SIGTERM, EXPLAIN_S if grace_period is None else grace_period, grace_period)
            if any(each.alive for each in self._ranks):
                return False
            self._end_leftovers()
        except BaseException:
            self._interrupt()
            raise
        self._finish()
        return True

    # The end -----------------------------------------------------------------------------------------------

    @property
    def _was_reentered(self) -> bool:
        """Whether a child called `spawn` while it imported the script."""
        return any(each.status == REENTERED_STATUS and not each.record() for each in self._ranks)

    def _wait(self, timeout_s: float | None) -> None:
        alive = [each for each in self._ranks if each.alive]
        ended = wait([each.pidfd for each in alive], timeout_s) if alive else []
        for each in alive:
            if each.pidfd in ended:
                each.reap()

    def _end(self, first_signal: int, wait_s: float, grace_s: float | None = None) -> None:
        """Wait ``wait_s`` for the ranks to exit, then send ``first_signal``, then SIGKILL."""
        ending = Termination(_GRACE_S if grace_s is None else grace_s, first_signal=first_signal)
        ending.begin(time.monotonic(), 0.0 if self._was_reentered else wait_s)
        while any(each.alive for each in self._ranks):
            number = ending.due(time.monotonic())
            if number:
                for each in self._ranks:
                    each.end(number)
            self._wait(_TICK_S)

    def _interrupt(self) -> None:
        """End everything after Ctrl-C; a second one kills."""
        self._failed = True
        try:
            self._end(signal.SIGINT, _INTERRUPT_S)
            self._end_leftovers()
        except BaseException:
            self._kill()
            raise
        finally:
            self._close()

    def _kill(self) -> None:
        for each in self._ranks:
            each.end(signal.SIGKILL)
        termination.send_signal(self._other_processes(), signal.SIGKILL)
        for each in self._ranks:
            each.reap()

    def _other_processes(self) -> list[int]:
        """Return the running processes that the ranks started: they inherited a variable or the exit record."""
        ranks = {each.pid for each in self._ranks}
        found = {
            *termination.with_variable(JOB_VARIABLE, f"unix:{self._name}"),
            *termination.holders_of_memfd(f"{self._name}-record"),
        }
        return list(found - ranks)

    def _end_leftovers(self) -> None:
        """End processes that outlive the ranks: wait a moment, then SIGTERM, then SIGKILL."""
        ending = Termination(_GRACE_S)
        ending.begin(time.monotonic(), 0.0 if self._failed else LEFTOVER_S)
        while others := self._other_processes():
            number = ending.due(time.monotonic())
            if number:
                if not self._leftovers:
                    self._leftovers = [f"pid {pid}: {termination.command_line(pid)[:200]}" for pid in others]
                termination.send_signal(others, number)
            time.sleep(_TICK_S)

    def _finish(self) -> None:
        """Judge, now that all processes are gone; raise the error or collect the return values."""
        findings = self._coordinator.close() if self._coordinator is not None else []
        outcomes = [each.outcome(self._oom) for each in self._ranks]
        try:
            verdict = judge(outcomes, findings)
            if self._was_reentered:
                self._error = _reentered()
            elif verdict is not None and self._exiting:
                # torch cannot be imported by an interpreter that exits: it registers exit handlers.
                sys.stderr.write(verdict_text(verdict, self._leftovers))
            elif verdict is not None:
                # Imports torch.
                from .errors import spawn_error

                causes = {each.rank: each.exception() for each in self._ranks if each.failed}
                self._error = spawn_error(verdict, self._leftovers, causes)
            elif self._want_results:
                self.results = [each.returned() for each in self._ranks]
        except AllhandsError as problem:
            self._error = problem
        finally:
            self._close()
        if self._error is not None:
            raise self._error
        if self._leftovers:
            _log.warning("ended what the ranks had left behind: %s", "; ".join(self._leftovers))

    def _close(self) -> None:
        self._over = True
        _live.discard(self)
        if self._coordinator is not None:
            self._coordinator.close()
        self._master.close()
        for each in self._ranks:
            each.close()

    def _exit(self) -> None:
        """At exit of an interpreter that did not join: end daemons as multiprocessing does, join the others."""
        if self._over:
            return
        self._exiting = True
        try:
            if self._daemon or isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
                self._end(signal.SIGTERM if self._daemon else signal.SIGINT, 0.0 if self._daemon else _INTERRUPT_S)
                self._end_leftovers()
                self._close()
                return
            while not self.join():
                pass
        except AllhandsError as problem:
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")


def _close_all_in_fork() -> None:
    """Close, in a fork of the parent, the descriptors by which processes of the ranks are found."""
    for context in _live:
        for each in context._ranks:  # noqa: SLF001  # this module's own class
            each.close()
    _live.clear()


os.register_at_fork(after_in_child=_close_all_in_fork)


class _SpawnedRank(ExitEvidence):
    """One rank as its parent sees it: its evidence, in memory of the parent, and its process once it is started."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, f"{name}-record")
        self.pidfd = -1
        self._process: BaseProcess | None = None
        self._result = os.memfd_create("allhands-result", os.MFD_CLOEXEC)
        self._descriptors.append(self._result)
        # For `child.run`.
        self.descriptors = InheritedFds(self._record, self._fatal, self._recorder, self._result)

    def started(self, process: BaseProcess) -> None:
        """Record the process. Its pidfd shows its end; multiprocessing's sentinel is also held by its children."""
        self._process, self.pid = process, process.pid or 0
        self.started_s = time.monotonic()
        self.pidfd = os.pidfd_open(self.pid)
        self._descriptors.append(self.pidfd)

    @property
    def alive(self) -> bool:
        """Whether it was started and its end has not been seen yet."""
        return self._process is not None and self.status is None

    def reap(self) -> None:
        """Wait for its end, and note it."""
        if self._process is None or self.status is not None:
            return
        wait([self.pidfd])
        self.ended_s = time.monotonic()
        # Not join with a timeout: that waits for the processes that were forked from it.
        while self._process.exitcode is None and time.monotonic() < self.ended_s + _STATUS_S:
            time.sleep(_STATUS_POLL_S)
        self.status = self._process.exitcode
        if self.status is None:
            # A SIGCHLD handler of the user's has reaped it; the exit record is left.
            self.status = 0 if self.record().get("end") == "done" else 1
        else:
            self._process.join()

    def end(self, number: int) -> None:
        """Send a signal that should end it, unless it is ending; SIGKILL in any case."""
        if not self.alive or (number != signal.SIGKILL and "end" in self.record()):
            return
        self._note_signal(number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def exception(self) -> BaseException | None:
        """Return the exception that it stored; None where it cannot be unpickled here."""
        try:
            found = self._unpickle()
        except Exception:  # noqa: BLE001  # the user's class may raise anything
            return None
        return found if isinstance(found, BaseException) else None

    def returned(self) -> object:
        """Return the function's return value; raise ArgumentError, naming the rank, where there is none."""
        end = self.record().get("end")
        if end == "done" and not os.fstat(self._result).st_size:
            return None  # It called sys.exit().
        if end != "done":
            raise self._no_result("the process ended with status 0 before the function returned: os._exit")
        try:
            return self._unpickle()
        except Exception as problem:
            raise self._no_result(f"{type(problem).__name__}: {problem}") from problem

    def _no_result(self, why: str) -> AllhandsError:
        return fail(
            "invalid-argument",
            f"there is no result of rank {self.rank}",
            who=f"rank {self.rank} (pid {self.pid})",
            why=why,
            fix="return what both processes can import, from the end of the function",
            ranks=(self.rank,),
        )

    def _unpickle(self) -> object:
        os.lseek(self._result, 0, os.SEEK_SET)
        with open(self._result, "rb", closefd=False) as file:
            return pickle.load(file)  # noqa: S301  # written by our own child, into memory that no other process has


# Calls that are refused, before a process is started where possible --------------------------------------


def _checked_context(fn: Callable[..., object], nprocs: int, start_method: str, *, has_ranks: bool) -> BaseContext:
    """Return multiprocessing's context for ``start_method``; raise ArgumentError for a function that it cannot run.

    ``has_ranks`` is whether this process has ranks of another spawn.
    """
    methods = multiprocessing.get_all_start_methods()
    if start_method not in methods:
        raise _refusal(f"start_method={start_method!r} does not exist here", "", f"use one of {', '.join(methods)}")
    if not callable(fn):
        raise _refusal(f"{fn!r} is not a function", "", "pass the function first: spawn(fn, args=(...), nprocs=2)")
    if type(nprocs) is not int or nprocs < 1:
        raise _refusal(f"nprocs={nprocs!r} is not a number of processes", "", "pass at least 1")
    if start_method == "fork":
        _check_fork(has_ranks=has_ranks)
    else:
        _check_importable(fn, start_method)
    return multiprocessing.get_context(start_method)


def _check_fork(*, has_ranks: bool) -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise _refusal(
            'start_method="fork" in a process that has a process group',
            "a fork shares the group's connections and memory, but none of the threads that serve them",
            'call destroy_process_group() first, or use start_method="spawn"',
        )
    if has_ranks:
        raise _refusal(
            'start_method="fork" while this process serves the ranks of another spawn',
            "a fork would hold their coordinator's connections open",
            'join those first, or use start_method="spawn"',
        )


def _check_importable(fn: Callable[..., object], start_method: str) -> None:
    """Refuse a function that another process cannot find by importing its module."""
    name = getattr(fn, "__qualname__", "")
    if not name:
        return
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    interactive = getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file))  # noqa: PTH110
    if "<" in name:
        why = f"{name} has no name at the top level of a module, by which another process could find it"
    elif getattr(fn, "__module__", "") == "__main__" and interactive:
        why = f"{name} was typed into a notebook or a prompt, which another process cannot import"
    else:
        return
    raise _refusal(
        f'{name} cannot be run with start_method="{start_method}"',
        why,
        'pass start_method="fork" (before anything uses CUDA), or move the function to a file that can be imported',
    )


def _unpicklable(problem: Exception, fn: Callable[..., object], args: tuple[Any, ...]) -> AllhandsError:
    """Return the error that names the argument that cannot be pickled."""
    culprit = "fn or args"
    for name, value in [("fn", fn), *((f"args[{index}]", value) for index, value in enumerate(args))]:
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001  # pickling may raise anything
            culprit = f"{name}, a {type(value).__name__},"
            break
    return _refusal(
        f"{culprit} cannot be sent to another process",
        f"{type(problem).__name__}: {problem}",
        'pass what pickle can take (names at the top level of a module, plain data, tensors), or start_method="fork"',
    )


def _refusal(what: str, why: str, fix: str) -> AllhandsError:
    return fail("invalid-argument", f"spawn: {what}", who=f"this process (pid {os.getpid()})", why=why, fix=fix)


def _reentered() -> AllhandsError:
    return fail(
        "invalid-argument",
        "the script calls spawn whenever it is imported",
        who="every process that spawn started: each imports the script to find the function",
        why='the call is not under `if __name__ == "__main__":` (observed: the children called it again)',
        fix='put the call, and what only the parent is to do, under `if __name__ == "__main__":`; '
        'or pass start_method="fork"',
    )
