"""`allhands.spawn`: ranks as children of this process, with what torch.multiprocessing.spawn takes and means."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from ...environments.world import Address
from ...errors import AllhandsError
from .. import oom, process_tree, verdict_text
from ..ending import EXPLAIN_S, LEFTOVER_S, Ending
from ..job import Job
from ..variables import MARK, STALE, variables
from ..verdict import judge
from . import refusing
from .child import NAME, UNGUARDED, Order, importing, run
from .coordinator_thread import Backstage
from .offspring import Offspring

__all__ = ["Children", "spawn"]

_log = logging.getLogger("allhands")

# How soon a due signal or a leftover process is looked at again; ends of children are seen at once.
_LOOK_S = 0.02

# From the signal that asks a child to end to the one that ends it; the default of `allhands run --grace`.
_GRACE_S = 10.0

# A terminal's Ctrl-C goes to the children too; one that is about to end is not interrupted a second time.
_INTERRUPT_S = 0.3

# Children of this process that are not over, and so must not be passed on by a fork.
_live: set[Children] = set()


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

    Inside, `init_process_group()` needs no address, port, rank or size. Returns None once all are done; with
    ``results=True`` the list of what they returned, by rank; with ``join=False`` at once, a `Children` to join. Where
    a rank fails the others are ended, and SpawnRaised or SpawnExited is raised with its traceback and with who only
    followed; its own exception is the ``__cause__`` where it can be pickled. Ctrl-C ends all, and so does the death of
    this process. Raises ArgumentError, before a process is started, for what cannot be run in another process.
    """
    if importing():
        raise refusing.unguarded()
    context = refusing.chosen(fn, nprocs, start_method, serving=bool(_live))
    children = Children(fn, tuple(args), nprocs, daemon=daemon, context=context, results=results)
    if not join:
        return children
    while not children.join():
        pass
    return children.results if results else None


class Children:
    """The ranks that `spawn` started: torch's ProcessContext, and what they returned."""

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
        self._wanted, self._daemon = results, daemon
        self._name = f"allhands-{secrets.token_hex(8)}"
        self._offspring: list[Offspring] = []
        self._backstage: Backstage | None = None
        self._problem: AllhandsError | None = None
        self._over = False
        self._failed = False
        self._exiting = False
        self._leftovers: list[str] = []
        self._memory = oom.Memory()
        # Kept bound and not listening, so that nobody else is given it: where torch's own env:// meets.
        self._master = socket.socket()
        try:
            self._master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._master.bind(("127.0.0.1", 0))
            token = secrets.token_hex(16)
            for rank in range(nprocs):
                self._start(context, daemon, self._order(rank, nprocs, context, token), fn, args)
            _live.add(self)
            # After the children, whose interpreters start meanwhile, and which may be forks.
            self._backstage = Backstage(self._name, token)
        except BaseException:
            self._kill()
            self._close()
            raise
        self._at_exit = multiprocessing.util.Finalize(None, self._exit, exitpriority=50)

    def _order(self, rank: int, nprocs: int, context: BaseContext, token: str) -> Order:
        job = Job(target="", name=self._name, local_world_size=nprocs)
        kept = {name: os.environ[name] for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",) if name in os.environ}
        found = variables(
            job,
            rank,
            0,
            coordinator=f"unix:{self._name}",
            token=token,
            master=Address(*self._master.getsockname()),
            environment=kept,
        )
        # Nobody is elastic here, and threads are the caller's business, as in torch's own spawn.
        elastic = [name for name in found if name.startswith("TORCHELASTIC_")]
        ours = {name: value for name, value in found.items() if name not in {*elastic, "OMP_NUM_THREADS"}}
        made = Offspring(rank, self._name)
        self._offspring.append(made)
        main = threading.current_thread() is threading.main_thread()
        return made.order(
            parent=os.getpid(),
            direct=main and context.get_start_method() != "forkserver",
            results=self._wanted,
            environment=ours,
            dropped=(*STALE, *elastic),
        )

    def _start(
        self, context: BaseContext, daemon: bool, order: Order, fn: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # each context has its own
            target=run, args=(order, fn, args), name=f"{NAME}{order.rank}", daemon=daemon
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError) as problem:
            # It is pickled before the process is started; where it was started, this is something else.
            if process.pid is not None:
                raise
            raise refusing.unpicklable(problem, fn, args) from problem
        self.processes.append(process)
        self._offspring[order.rank].started(process)

    # torch's ProcessContext --------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Return the pids of the ranks, in order."""
        return [each.pid for each in self._offspring]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a rank ends, at most ``timeout`` seconds; return whether all have.

        Where one failed, the others have ``grace_period`` (2 s) to end by themselves and say why, and as long (10 s)
        after SIGTERM until SIGKILL; then SpawnRaised or SpawnExited is raised.
        """
        if self._problem is not None:
            raise self._problem
        if self._over:
            return True
        try:
            self._wait(timeout)
            if any(each.failed for each in self._offspring):
                self._failed = True
                self._end(signal.SIGTERM, EXPLAIN_S if grace_period is None else grace_period, grace_period)
            if any(each.alive for each in self._offspring):
                return False
            self._leftover()
        except BaseException:
            self._interrupt()
            raise
        self._finish()
        return True

    @property
    def _unguarded(self) -> bool:
        """Whether a child came to `spawn` again while it imported the script."""
        return any(each.status == UNGUARDED and not each.record() for each in self._offspring)

    # The end -----------------------------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> None:
        alive = {each.pidfd: each for each in self._offspring if each.alive}
        for pidfd in Offspring.wait(list(alive), timeout):
            alive[pidfd].reap()
            self._memory.look(alive[pidfd].pid)

    def _end(self, polite: int, patience_s: float, grace_s: float | None = None) -> None:
        """Wait for the end of all: ``patience_s`` by themselves, then by the signal ``polite``, then by SIGKILL."""
        ending = Ending(_GRACE_S if grace_s is None else grace_s, polite=polite)
        ending.fail(time.monotonic(), 0.0 if self._unguarded else patience_s)
        while any(each.alive for each in self._offspring):
            number = ending.due(time.monotonic())
            for each in self._offspring:
                if number:
                    each.send(number)
            self._wait(_LOOK_S)

    def _interrupt(self) -> None:
        """Ctrl-C, here or in all: end everything; a second one ends it at once."""
        self._failed = True
        try:
            self._end(signal.SIGINT, _INTERRUPT_S)
            self._leftover()
        except BaseException:
            self._kill()
            raise
        finally:
            self._close()

    def _kill(self) -> None:
        for each in self._offspring:
            each.send(signal.SIGKILL)
        process_tree.kill(self._others(), signal.SIGKILL)
        for each in self._offspring:
            each.reap()

    def _others(self) -> list[int]:
        """Return the processes that the ranks started and that are still there, by what only those have."""
        ours = {each.pid for each in self._offspring}
        found = {*process_tree.marked(MARK, f"unix:{self._name}"), *process_tree.holding(f"{self._name}-record")}
        return [pid for pid in found - ours if process_tree.running(pid)]

    def _leftover(self) -> None:
        """End what outlives the ranks: a moment to go by itself, then SIGTERM, then SIGKILL."""
        ending = Ending(_GRACE_S)
        ending.fail(time.monotonic(), 0.0 if self._failed else LEFTOVER_S)
        while others := self._others():
            number = ending.due(time.monotonic())
            if number:
                if not self._leftovers:
                    self._leftovers = [f"pid {pid}: {process_tree.command(pid)[:200]}" for pid in others]
                process_tree.kill(others, number)
            time.sleep(_LOOK_S)

    def _finish(self) -> None:
        """All are gone: raise what is to be raised, and gather what they returned."""
        findings = self._backstage.close() if self._backstage is not None else []
        outcomes = [each.outcome(self._memory) for each in self._offspring]
        try:
            verdict = judge(outcomes, findings)
            if self._unguarded:
                self._problem = refusing.unguarded()
            elif verdict is not None and self._exiting:
                # What torch registers at import is refused by an interpreter that ends.
                sys.stderr.write(verdict_text.words(verdict, self._leftovers))
            elif verdict is not None:
                # Here, because it imports torch.
                from .errors import explain

                causes = {each.rank: each.parcel() for each in self._offspring if each.failed}
                found = {rank: cause for rank, cause in causes.items() if isinstance(cause, BaseException)}
                self._problem = explain(verdict, self._leftovers, found)
            elif self._wanted:
                self.results = [each.returned() for each in self._offspring]
        except AllhandsError as problem:
            self._problem = problem
        finally:
            self._close()
        if self._problem is not None:
            raise self._problem
        if self._leftovers:
            _log.warning("ended what the ranks had left behind: %s", "; ".join(self._leftovers))

    def _close(self) -> None:
        self._over = True
        _live.discard(self)
        if self._backstage is not None:
            self._backstage.close()
        self._master.close()
        for each in self._offspring:
            each.close()

    def _exit(self) -> None:
        """Nobody has joined them, and the interpreter ends: what multiprocessing does, and then what `join` does."""
        if self._over:
            return
        self._exiting = True
        try:
            if self._daemon or isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
                self._end(signal.SIGTERM if self._daemon else signal.SIGINT, 0.0 if self._daemon else _INTERRUPT_S)
                self._leftover()
                self._close()
                return
            while not self.join():
                pass
        except AllhandsError as problem:
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")

    def disown(self) -> None:
        """In a fork of the parent: close what would pass for being one of the ranks."""
        for each in self._offspring:
            each.close()


def _forget() -> None:
    for children in _live:
        children.disown()
    _live.clear()


os.register_at_fork(after_in_child=_forget)
