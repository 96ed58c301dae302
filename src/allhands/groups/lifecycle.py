"""The life of the default group: form it, hold it for a block, end it, whatever the reason."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from .. import _torch, settings
from .._version import __version__
from ..control.join import answer_roll_call
from ..control.messages import Claim
from ..control.process_identity import this_process
from ..diagnosis import duration, join, title
from ..engines.base import EngineTimeout
from ..engines.cuda import nccl
from ..engines.gloo import connections
from ..engines.needs import needs
from ..errors import AllhandsError, error, fail
from ..observe import flight_recorder, stacks
from . import desync_check, engine_choice, failure, registration
from . import session as _session
from .bootstrap import bootstrap
from .collectives import note_destroyed
from .session import Session, call_site, positive_timeout

__all__ = ["attend", "destroy_process_group", "end", "init_process_group", "process_group"]

_log = logging.getLogger("allhands")

# How long ranks may take to arrive where the caller gives no timeout. Schedulers start nodes minutes apart; torch's
# half an hour is longer than anyone watches a screen.
_DEFAULT_ROLL_CALL_S = 600.0

# How long before the deadline a closed port is reported: at the deadline the group ends without knowing the reason.
_REPORT_S = 0.5

# Minimum time for torch to connect the group, however late the last rank arrived.
_MIN_CONNECT_S = 0.3

# How often to poll while torch connects the group, and how long torch may take to notice the group's end.
_POLL_S, _NOTICE_S = 0.05, 0.3

# Limit for torch's teardown, which joins threads of its engine; a teardown that takes longer is left behind.
_TORCH_END_S = 5.0

# The same where operations were abandoned: such an engine never ends, and this is for what torch does before.
_ABANDONED_S = 0.2
# Gloo's threads take well under a millisecond to return from an operation whose connections ended.
_GLOO_WAKES_S = 0.02

# Counts the groups that this process formed; all ranks count alike.
_generation = 0


def init_process_group(  # noqa: PLR0917  # torch's signature
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
) -> None:
    """Form the default process group, with torch's signature and meaning. Every rank calls this.

    Blocks until every rank has arrived, at most ``timeout`` (10 minutes where none is given), and otherwise raises the
    same diagnosis on every rank: which ranks are missing, double or different. Without any address, ranks on one host
    meet by the process that started them.
    """
    if dist.is_initialized():
        session = _session.current()
        raise fail(
            "already-initialised",
            "init_process_group was called, but there is a process group already",
            who="this process",
            why=f"it was formed at {session.formed_at}" if session else "torch.distributed formed it",
            fix="call destroy_process_group() first, or use the group that is there (new_group makes subgroups)",
        )
    registration.register()
    name = str(backend).lower() if backend is not None else ""
    if name == "fake":
        # torch's stand-in for tests: no other rank takes part.
        dist.init_process_group(backend, world_size=world_size, rank=rank, store=store)
        return
    torch_backend, engine = engine_choice.split(backend)
    limit = positive_timeout(timeout)
    deadline = time.monotonic() + (limit.total_seconds() if limit is not None else _DEFAULT_ROLL_CALL_S)
    end(wait_s=0.0)  # What torch's own destroy_process_group left of an earlier group.
    session = _attend(
        init_method,
        store,
        rank=rank,
        world_size=world_size,
        name=name,
        device=_current_device(device_id),
        deadline=deadline,
        timeout=limit or _torch.default_timeout(name or "gloo"),
    )
    before = sys.excepthook  # torch sets its own and never removes it
    more: dict[str, Any] = {} if _ranks is None else {"_ranks": _ranks}  # not in every torch
    chosen = torch_backend if torch_backend is not None else _default_backend()

    def form() -> None:
        dist.init_process_group(
            backend=chosen,
            store=session.store,
            rank=session.member.rank,
            world_size=session.member.world_size,
            timeout=session.timeout,
            group_name=group_name,
            pg_options=engine or pg_options,
            device_id=device_id,
            **more,
        )

    session.enter("init_process_group", session.formed_at)
    session.connections.probe_until = None if session.one_host else deadline - _REPORT_S
    try:
        _prepare(session, name)
        _torch.forget_failed_groups()
        if "nccl" in chosen:
            form()  # The current GPU belongs to the thread.
        else:
            _form_by(max(deadline, time.monotonic() + _MIN_CONNECT_S), session, form)
        desync_check.start(session, dist.group.WORLD)
    except Exception as problem:  # noqa: BLE001  # raised again as what it means
        explained = _not_formed(session, name, problem)
        _abandon(session, explained)
        raise explained from (problem if explained.slug == "engine-failed" else None)
    except BaseException as problem:
        _abandon(session, problem)
        raise
    finally:
        session.connections.probe_until = None
        session.leave(None)
    session.formed = True
    _hook(session, before)
    note_destroyed("")


def attend(store: Store, rank: int, world_size: int, timeout: timedelta) -> Session:
    """Hold the roll call for a group that torch itself is forming; the ranks meet by torch's store."""
    deadline = time.monotonic() + timeout.total_seconds()
    session = _attend(
        None, store, rank=rank, world_size=world_size, name="allhands", device=None, deadline=deadline, timeout=timeout
    )
    try:
        _prepare(session, "allhands")
    except BaseException as problem:
        _abandon(session, problem)
        raise
    session.formed = True
    _hook(session, sys.excepthook)
    return session


def _attend(
    init_method: str | None,
    store: Store | None,
    *,
    rank: int,
    world_size: int,
    name: str,
    device: torch.device | None,
    deadline: float,
    timeout: timedelta,
) -> Session:
    """Answer the roll call; return the session of the complete group."""
    global _generation  # noqa: PLW0603  # counts for this process, as torch's group counter does
    world, board, problem = bootstrap(
        init_method, store, rank=rank, world_size=world_size, generation=_generation + 1, deadline=deadline
    )
    # Counted here, where all ranks take part: a rank that fails earlier must not get out of step.
    _generation += 1
    # From here on this rank may wait for others, and its stack may be asked for.
    stacks.register()
    flight_recorder.own().set_rank(world.rank, world.world_size)
    trouble = problem.diagnosis if problem is not None else needs(name, world.world_size, world.rank, device)
    read = settings.read()
    uses_nccl = "nccl" in name
    claim = Claim(
        identity=this_process(),
        backend=name,
        device=str(device) if uses_nccl and device is not None else "",
        gpu=nccl.gpu(device) if uses_nccl else "",
        torch=str(torch.__version__),
        allhands=__version__,
        launcher=world.source,
        timeout_s=deadline - time.monotonic(),
        node_rank=-1 if world.node_rank is None else world.node_rank,
        local_world_size=-1 if world.local_world_size is None else world.local_world_size,
        mixed_versions=read.mixed_versions,
        trouble=trouble,
        generation=_generation,
    )
    membership = answer_roll_call(world, claim, settings=read, deadline=deadline, rendezvous=board)
    session = Session(membership, timeout, call_site(), world.local_world_size)
    _session.set_current(session)
    return session


# Forming torch's group -----------------------------------------------------------------------------------------------


def _default_backend() -> str:
    """Return the backend where the caller names none: our own where there are only CPUs.

    With GPUs, torch's for both kinds of tensor; its own default takes the GPU's and refuses CPU tensors.
    """
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "allhands"


def _current_device(device_id: torch.device | int | None) -> torch.device | None:
    """Return the GPU that this rank uses: the one given, else the current one where there is one, else None."""
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    if device_id is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return device_id


def _prepare(session: Session, name: str) -> None:
    """Point Gloo at the interface that leads to the peers, for as long as the group lives."""
    rank = session.member.rank
    chosen = os.environ.get(connections.IFNAME, "")
    if chosen:
        for part in chosen.split(","):
            connections.check_interface(part, one_host=session.one_host, rank=rank)
    else:
        interface = (
            connections.loopback_interface() if session.one_host else connections.interface_of(session.own_address)
        )
        if interface:
            os.environ[connections.IFNAME] = interface
            session.undo.callback(os.environ.pop, connections.IFNAME, None)
    if "nccl" in name and session.one_host and session.member.world_size > 1:
        nccl.check_shared_memory(session.local_world_size or session.member.world_size, rank)


def _not_formed(session: Session, name: str, problem: Exception) -> AllhandsError:
    """Return why torch could not form the group although every rank answered, for this rank and the others."""
    explained = failure.explain(session, problem, "init_process_group", session.formed_at)
    if explained is not None:
        return explained
    if isinstance(problem, AllhandsError):
        return error(session.member.end_group(problem.diagnosis))
    first = (str(problem).splitlines() or [""])[0]
    found = fail(
        "engine-failed",
        f"torch could not form the {name or 'default'} group although every rank answered the roll call",
        who=f"rank {session.member.rank} ({socket.gethostname()}, pid {os.getpid()})",
        why=f"{type(problem).__name__}: {first}",
        fix="torch refused the arguments: check backend=, device_id= and pg_options="
        if isinstance(problem, ValueError | TypeError | AssertionError)
        else "ranks connect to each other on ports above 1023: open them between the hosts; check GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME",
        ranks=(session.member.rank,),
        hosts=(socket.gethostname(),),
    )
    return error(session.member.end_group(found.diagnosis))


def _form_by(deadline: float, session: Session, form: Callable[[], None]) -> None:
    """Run ``form`` in another thread, and leave it behind where it outlasts the deadline or the group's end.

    While connecting, Gloo waits for a lost peer five times its timeout, and cannot be interrupted. Its timeout is that
    of collectives, because messages keep the first one they are given.
    """
    future: Future[None] = Future()
    left_behind = threading.Event()

    def run() -> None:
        try:
            form()
        except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
            future.set_exception(problem)
            return
        future.set_result(None)
        if left_behind.is_set():
            dist.destroy_process_group()  # Too late: all ranks have raised that there is no group.

    threading.Thread(target=run, name="allhands-form", daemon=True).start()
    ended_at: float | None = None
    while not wait([future], _POLL_S).done:
        now = time.monotonic()
        if ended_at is None and session.member.verdict is not None:
            ended_at = now
        # Once the group is over, the store and the connections raise by themselves, if torch waits for those.
        if now >= deadline or (ended_at is not None and now - ended_at >= _NOTICE_S):
            left_behind.set()
            raise EngineTimeout("timed out waiting for torch to connect the group")
    future.result()


# Ending --------------------------------------------------------------------------------------------------------------


@contextmanager
def process_group(*args: Any, **kw: Any) -> Iterator[ProcessGroup]:
    """Form the default group for the length of a `with` block; takes what `init_process_group` takes.

    An exception that leaves the block is reported to the other ranks, whose pending calls raise PeerFailed.
    """
    init_process_group(*args, **kw)
    try:
        yield dist.group.WORLD  # type: ignore[misc]  # set once init_process_group has returned
    except BaseException as problem:
        session = _session.current()
        if session is None or (isinstance(problem, SystemExit) and not problem.code):
            raise
        # Code that calls torch directly (DDP) raises torch's "connection closed"; the verdict has the reason.
        explained = failure.explain(session, problem, "the block", session.formed_at)
        failure.announce(session, explained or problem)
        # No chain of two exceptions with one diagnosis.
        known = isinstance(problem, AllhandsError) and explained and explained.diagnosis == problem.diagnosis
        if explained is None or known:
            raise
        raise explained from problem
    finally:
        destroy_process_group()


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """End ``group``, or with None (or WORLD) the default group and everything that was made from it.

    Safe at any time: before init, twice, after a failure, in a signal handler, at exit. Waits for the other ranks to
    call it too, at most ALLHANDS_DESTROY_TIMEOUT seconds (5), and then logs which were still busy. Raises
    CollectiveMismatch after the end where the last calls of the ranks differed and no call has raised that.
    """
    if isinstance(group, int):
        return  # dist.GroupMember.NON_GROUP_MEMBER, which new_group returns on ranks outside the group.
    if group is not None and group is not dist.group.WORLD:
        if group in _torch.groups():
            session = _session.current()
            if session is not None:
                session.desync_checks.pop(group, None)
            dist.destroy_process_group(group)
        return
    site = call_site()
    had = dist.is_initialized()
    late = end()
    if had:
        note_destroyed(site)
    if late is not None:
        raise late


def end(wait_s: float | None = None, how: str = "destroy") -> AllhandsError | None:
    """End the session and torch's default group, whatever state they are in. Waits at most ``wait_s`` for peers.

    Returns what to raise where the ranks' last calls differed, which no call has compared.
    """
    session = _session.current()
    if session is None:
        if dist.is_initialized() and wait_s is None:
            dist.destroy_process_group()
        return None
    if session.member.forked:
        return None  # It is the parent's group, and its sockets are shared: they must not be closed here.
    # First, so that a signal handler that calls this in the middle finds nothing left to do.
    _session.set_current(None)
    limit = settings.read().destroy_timeout if wait_s is None else wait_s
    # A signal handler that ends the group in the middle of a collective interrupts it: the others wait for this rank,
    # so it does not wait for them.
    interrupted = session.busy
    if interrupted:
        limit = 0.0
    member = session.member
    late: AllhandsError | None = None
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
        elif limit and how == "destroy" and member.verdict is None:
            late = next(filter(None, map(failure.last_call_mismatch, _torch.groups())), None)
    broken = session.failed or interrupted or member.verdict is not None
    if broken:
        # What torch's engine still waits for will not arrive, and must not delay the end.
        session.connections.close_all()
    groups = [weakref.ref(group) for group in _torch.groups()]
    _end_torch(session)
    if broken:
        _keep_gloo([group for known in groups if (group := known()) is not None])
    member.close()
    if session.coordinator_process is not None:
        # It ends by itself once every member is gone; ranks that are still busy keep it for a moment.
        session.coordinator_process.end(1.0) if member.verdict is None else session.coordinator_process.detach()
    session.undo.close()
    return late


def _end_torch(session: Session) -> None:
    """Destroy torch's default group, and wait for that for a bounded time."""
    if not dist.is_initialized():
        return
    within_s = _ABANDONED_S if session.abandoned else _TORCH_END_S

    def run() -> None:
        try:
            dist.destroy_process_group()
        except Exception as problem:  # noqa: BLE001  # logged; the end continues
            _log.warning("torch's destroy_process_group failed: %s: %s", type(problem).__name__, problem)
        if not session.abandoned:
            # The last reference to the groups, in a cycle. Gloo's threads end with them; if they are left to Python's
            # collector at exit, a thread that is about to free a tensor ends the process with SIGABRT.
            session.desync_checks.clear()

    thread = threading.Thread(target=run, name="allhands-destroy", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        _log.warning("torch did not end its process group within %s; it is left behind", duration(within_s))


def _keep_gloo(groups: list[Any]) -> None:
    """Never free the Gloo backends of ``groups``, which the script or an abandoned call still holds.

    Gloo does not always wake an operation whose connections end, and its destructor, at exit, would wait for it.
    """
    found = [backend for group in groups for backend in _torch.backends(group)]
    kept = [backend for backend in found if type(backend).__name__ == "ProcessGroupGloo"]
    for backend in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
    if kept:
        # A thread of Gloo that frees a tensor while the interpreter ends would end the process with SIGABRT.
        time.sleep(_GLOO_WAKES_S)


def _abandon(session: Session, problem: BaseException) -> None:
    """Give up a group that did not form, and report it to the other ranks."""
    if session.member.verdict is None:
        failure.announce(session, problem)
    session.failed = True
    end(wait_s=0.0)


# Uncaught exceptions and exits ----------------------------------------------------------------------------------


def _hook(session: Session, before: Callable[..., None]) -> None:
    """Report an uncaught exception to the other ranks before the interpreter prints it, and leave the group at exit.

    ``before`` is restored as sys.excepthook once the group is over.
    """
    inner = sys.excepthook

    def announced(kind: Any, problem: BaseException, trace: Any) -> None:
        if _session.current() is session:
            failure.announce(session, problem)
        inner(kind, problem, trace)
        verdict = session.member.verdict
        # Ctrl-C reaches all ranks of a terminal: each has its own cause.
        if isinstance(problem, AllhandsError | KeyboardInterrupt) or verdict is None:
            return
        if verdict.ranks != (session.member.rank,):
            sys.stderr.write(f"\nThe cause, as allhands saw it:\n{verdict.render(title(verdict.slug))}\n")

    def restore() -> None:
        # torch may have wrapped it, and its wrapper would print one more "[rank0]:" for each group; a hook that the
        # user has set since is kept.
        if sys.excepthook is announced or getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = before

    sys.excepthook = announced
    session.undo.callback(restore)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    if multiprocessing.parent_process() is not None:
        # In a child of multiprocessing neither hook runs: its exception is caught above the user's function, and a
        # forked one ends without atexit. Its finalizers run while the exception is being handled.
        multiprocessing.util.Finalize(None, _at_process_exit, exitpriority=100)


def _at_process_exit() -> None:
    session, problem = _session.current(), sys.exception()
    if isinstance(problem, SystemExit) and problem.code:
        # torch.multiprocessing catches the exception, stores it and exits with 1.
        problem = problem.__context__ or problem
    if session is not None and problem is not None and not isinstance(problem, SystemExit):
        failure.announce(session, problem)
    _at_exit()


def _at_exit() -> None:
    session = _session.current()
    if session is None:
        return
    # Rank 0 keeps the coordinator for the others for a while; other ranks exit at once.
    end(wait_s=None if session.coordinator_process is not None else 0.0, how="exit")
