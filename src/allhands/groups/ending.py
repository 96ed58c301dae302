"""The end of this process's group, whatever brings it about, and how the other ranks are told of it."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .. import settings
from ..diagnosis import Diagnosis, duration, join, title
from ..errors import AllhandsError
from . import session as _session
from .session import Session

__all__ = ["abandon", "end", "hook"]

_log = logging.getLogger("allhands")

# torch's teardown joins threads of its engine; one that does not end is left behind rather than waited for.
_TORCH_END_S = 5.0

# An engine that gave up never ends; this is for what torch does before it asks it to.
_ABANDONED_S = 0.2


def end(wait_s: float | None = None, how: str = "destroy") -> Diagnosis | None:
    """End the session and torch's default group, whatever state they are in. Waits at most ``wait_s`` for peers.

    Returns what came to light meanwhile about earlier calls: that they differed between ranks.
    """
    session = _session.current()
    if session is None:
        if dist.is_initialized() and wait_s is None:
            dist.destroy_process_group()
        return None
    if session.member.forked:
        return None  # It is the parent's group; its sockets are shared, so not even they may be ended here.
    # First of all, so that a signal handler that comes here in the middle finds nothing left to do.
    _session.set_current(None)
    limit = settings.read().destroy_timeout if wait_s is None else wait_s
    # A signal handler that ends the group in the middle of a collective breaks it off: the others wait for this rank,
    # so it does not wait for them.
    broken_off = session.busy
    if broken_off:
        limit = 0.0
    member = session.member
    known = session.failed or member.verdict_raised
    if not session.failed and not member.over:
        still = member.leave(how, 0.0 if member.verdict is not None else limit)
        if still and limit:
            busy = join(
                [f"rank {status.rank} ({status.host}, pid {status.pid}) {status.doing}" for status in still[:8]]
            )
            _log.warning(
                "rank %d left the process group after %s although others were still busy: %s",
                member.rank,
                duration(limit),
                busy,
            )
            session.failed = True
    if session.failed or broken_off or member.verdict is not None:
        # Whatever torch's engine still waits for will not come; it must not hold up the end.
        session.cut()
    _end_torch(session)
    member.close()
    if session.beside is not None:
        # It ends by itself once every member is gone; others that are still busy keep it for a moment.
        session.beside.end(1.0) if member.verdict is None else session.beside.detach()
    for step in reversed(session.undo):
        step()
    late = member.verdict
    return late if not known and late is not None and late.slug == "collective-mismatch" else None


def _end_torch(session: Session) -> None:
    """Destroy torch's default group, and wait for that as long as it makes sense."""
    if not dist.is_initialized():
        return
    within_s = _ABANDONED_S if session.abandoned else _TORCH_END_S
    problems: list[BaseException] = []

    def run() -> None:
        try:
            dist.destroy_process_group()
        except Exception as problem:  # noqa: BLE001  # told below; an end goes on to its end
            problems.append(problem)
        if not session.abandoned:
            # The last that holds the groups, in a cycle. Gloo's threads end with them; left to the collector at the
            # interpreter's end, one that is about to let go of a tensor takes the process down with SIGABRT.
            session.desync_checks.clear()

    thread = threading.Thread(target=run, name="allhands-destroy", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        _log.warning("torch did not end its process group within %s; it is left behind", duration(within_s))
    for problem in problems:
        _log.warning("torch's destroy_process_group failed: %s: %s", type(problem).__name__, problem)


def abandon(session: Session, problem: BaseException) -> None:
    """Give up a group that did not form, and tell the others."""
    if session.member.verdict is None:
        session.announce(problem)
    session.failed = True
    end(wait_s=0.0)


# Uncaught exceptions and exits -----------------------------------------------------------------------------------


def hook(session: Session, before: Callable[..., None]) -> None:
    """Announce an uncaught exception before the interpreter prints it, and leave in good order at exit.

    ``before`` is what stands in sys.excepthook again once the group is over.
    """
    inner = sys.excepthook

    def announced(kind: Any, problem: BaseException, trace: Any) -> None:
        if _session.current() is session:
            session.announce(problem)
        inner(kind, problem, trace)
        _print_cause(session, problem)

    sys.excepthook = announced
    session.undo.append(_restore(announced, before))
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing passes by both: its exception is caught above the user's function, and
        # a forked one ends without atexit. Its finalizers run while the exception is still under way.
        multiprocessing.util.Finalize(None, _at_process_exit, exitpriority=100)


def _restore(ours: Callable[..., None], before: Callable[..., None]) -> Callable[[], None]:
    def restore() -> None:
        # torch may have wrapped it meanwhile, and its wrapper would print one more "[rank0]:" for each group;
        # a hook that the user set since is left alone.
        if sys.excepthook is ours or getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = before

    return restore


def _print_cause(session: Session, problem: BaseException) -> None:
    """Say who was to blame where torch's own error does not."""
    verdict: Diagnosis | None = session.member.verdict
    # Ctrl-C goes to all ranks of a terminal: each has its own cause.
    if verdict is None or isinstance(problem, AllhandsError | KeyboardInterrupt):
        return
    if verdict.ranks == (session.member.rank,):
        return
    sys.stderr.write(f"\nThe cause, as allhands saw it:\n{verdict.render(title(verdict.slug))}\n")


def _at_process_exit() -> None:
    session, problem = _session.current(), sys.exception()
    if isinstance(problem, SystemExit) and problem.code:
        # torch.multiprocessing catches the exception, writes it down and exits with 1.
        problem = problem.__context__ or problem
    if session is not None and problem is not None and not isinstance(problem, SystemExit):
        session.announce(problem)
    _at_exit()


def _at_exit() -> None:
    session = _session.current()
    if session is None:
        return
    # Rank 0 keeps the coordinator for the others a while; whoever else is done may go at once.
    late = end(wait_s=None if session.beside is not None else 0.0, how="exit")
    if late is not None:
        _log.error("%s", late.render(title(late.slug)))
