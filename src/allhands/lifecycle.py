"""From start to end: form the default group, end it, and see to it that an end is told to everyone."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from . import _entry, _torch, settings
from . import session as _session
from ._version import __version__
from .bootstrap import Bootstrap, bootstrap
from .collectives import note_destroyed
from .control import Claim, answer
from .control.identity import this_process
from .diagnosis import Diagnosis, duration, join, title
from .engines import gloo, nccl, needs
from .errors import AllhandsError, error, fail
from .session import Session, call_site

__all__ = [
    "attend",
    "destroy_process_group",
    "end",
    "forming",
    "init_process_group",
    "process_group",
]

_log = logging.getLogger("allhands")

# How long ranks may take to come where the caller gives no timeout. Schedulers start nodes minutes apart;
# torch's half an hour is longer than anyone looks at a screen.
_DEFAULT_ROLL_CALL_S = 600.0

# What is left of the deadline for torch to connect the group, at least.
_LEAST_CONNECT_S = 0.3

# torch's teardown joins threads of its engine; one that does not end is left behind rather than waited for.
_TORCH_END_S = 5.0

# Counts the groups that this process formed; all ranks count alike.
_generation = 0
_forming = threading.local()


def forming() -> bool:
    """Tell whether this thread is inside `init_process_group`, past the roll call."""
    return bool(getattr(_forming, "now", False))


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

    Blocks until every rank has come, at most ``timeout`` (10 minutes where none is given), and raises on
    every rank the same diagnosis of who is missing, double or different otherwise. With no address at all,
    ranks on one host meet by the process that started them.
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
    _entry.register()
    name = str(backend).lower() if backend is not None else ""
    if name == "fake":
        # torch's stand-in for tests: nothing is started and nobody comes.
        dist.init_process_group(backend, world_size=world_size, rank=rank, store=store)
        return
    limit = _timeout(timeout)
    started = time.monotonic()
    deadline = started + (limit.total_seconds() if limit is not None else _DEFAULT_ROLL_CALL_S)
    end(wait_s=0.0)  # What torch's own destroy_process_group left of an earlier group.
    found = bootstrap(
        init_method, store, rank=rank, world_size=world_size, generation=_next_generation(), deadline=deadline
    )
    device = _device(device_id)
    session = _attend(found, name, device, deadline, limit or _torch.default_timeout(name or "gloo"))
    left = max(_LEAST_CONNECT_S, deadline - time.monotonic())
    before = sys.excepthook  # torch puts its own in its place and never takes it off
    more: dict[str, Any] = {} if _ranks is None else {"_ranks": _ranks}  # not there in every torch
    _forming.now = True
    session.enter("init_process_group", session.formed_at)
    session.wire.until = None if session.one_host else deadline
    try:
        _prepare(session, name, found.world.local_world_size)
        _torch.forget_failed_groups()
        dist.init_process_group(
            backend=backend if backend is not None else _default_backend(),
            store=session.store,
            rank=found.world.rank,
            world_size=found.world.world_size,
            timeout=timedelta(seconds=left),
            group_name=group_name,
            pg_options=pg_options,
            device_id=device_id,
            **more,
        )
        # torch gives its engine one timeout for both; the rest of the deadline was only meant for connecting.
        _torch.set_timeout(session.timeout, dist.group.WORLD)
    except Exception as problem:  # noqa: BLE001  # raised again as what it means
        explained = _not_formed(session, name, problem)
        _abandon(session, explained)
        raise explained from (problem if explained.slug == "engine-failed" else None)
    except BaseException as problem:
        _abandon(session, problem)
        raise
    finally:
        _forming.now = False
        session.wire.until = None
        session.leave(None)
    _hook(session, before)
    note_destroyed("")


def attend(store: Store, rank: int, world_size: int, timeout: timedelta) -> Session:
    """Hold the roll call for a group that torch itself is forming, with torch's store as the place to meet."""
    deadline = time.monotonic() + timeout.total_seconds()
    found = bootstrap(None, store, rank=rank, world_size=world_size, generation=_next_generation(), deadline=deadline)
    session = _attend(found, "allhands", None, deadline, timeout)
    try:
        _prepare(session, "allhands", found.world.local_world_size)
    except BaseException as problem:
        _abandon(session, problem)
        raise
    _hook(session, sys.excepthook)
    return session


def _next_generation() -> int:
    global _generation  # noqa: PLW0603  # counts for this process, as torch's group counter does
    _generation += 1
    return _generation


def _timeout(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        limit = timeout
    elif isinstance(timeout, int | float):
        limit = timedelta(seconds=timeout)
    else:
        raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, not {type(timeout).__name__}")
    if limit is not None and limit <= timedelta(0):
        raise fail("invalid-argument", f"timeout={timeout} leaves no time", who="this process", fix="pass more than 0")
    return limit


def _default_backend() -> str | None:
    """Return what serves both kinds of tensor; torch's own default takes the GPU's and refuses CPU tensors."""
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else None


def _device(device_id: torch.device | int | None) -> torch.device | None:
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    if device_id is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return device_id


def _attend(found: Bootstrap, name: str, device: torch.device | None, deadline: float, timeout: timedelta) -> Session:
    """Answer the roll call; return the session of the complete group."""
    world = found.world
    trouble = found.trouble.diagnosis if found.trouble is not None else needs(name, world.world_size, world.rank)
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
    seat = answer(world, claim, settings=read, deadline=deadline, board=found.board)
    session = Session(seat, timeout, call_site())
    _session.set_current(session)
    return session


def _prepare(session: Session, name: str, local_world_size: int | None) -> None:
    """Point Gloo at the interface that leads to the peers, for as long as the group lives."""
    rank = session.member.rank
    chosen = os.environ.get(gloo.IFNAME, "")
    if chosen:
        for part in chosen.split(","):
            gloo.check_interface(part, one_host=session.one_host, rank=rank)
    else:
        interface = gloo.loopback_interface() if session.one_host else gloo.interface_of(session.own_address)
        if interface:
            os.environ[gloo.IFNAME] = interface
            session.undo.append(_unset_interface)
    if "nccl" in name and session.one_host and session.member.world_size > 1:
        nccl.check_shared_memory(local_world_size or session.member.world_size, rank)


def _unset_interface() -> None:
    os.environ.pop(gloo.IFNAME, None)


def _not_formed(session: Session, name: str, problem: Exception) -> AllhandsError:
    """Say why torch could not form the group although every rank answered, to this rank and to the others."""
    explained = session.explain(problem, "init_process_group", session.formed_at)
    if explained is not None:
        return explained
    if isinstance(problem, AllhandsError):
        return error(session.member.condemn(problem.diagnosis))
    first = (str(problem).splitlines() or [""])[0]
    found = fail(
        "engine-failed",
        f"torch could not form the {name or 'default'} group although every rank answered the roll call",
        who=f"rank {session.member.rank} ({socket.gethostname()}, pid {os.getpid()})",
        why=f"{type(problem).__name__}: {first}",
        fix="ranks connect to each other on ports above 1023: open them between the hosts; check GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME",
        ranks=(session.member.rank,),
        hosts=(socket.gethostname(),),
    )
    return error(session.member.condemn(found.diagnosis))


# The end ---------------------------------------------------------------------------------------------------------


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """End ``group``, or with None (or WORLD) the default group and everything that was made from it.

    Safe at any time: before init, twice, after a failure, in a signal handler, at exit. Waits for the other
    ranks to come here too, at most ALLHANDS_DESTROY_TIMEOUT seconds (5), and then says who was still busy.
    """
    if isinstance(group, int):
        return  # dist.GroupMember.NON_GROUP_MEMBER, which new_group gives to whoever is not in the group.
    if group is not None and group is not dist.group.WORLD:
        if group in _torch.groups():
            dist.destroy_process_group(group)
        return
    site = call_site()
    had = dist.is_initialized()
    end()
    if had:
        note_destroyed(site)


def end(wait_s: float | None = None, how: str = "destroy") -> None:
    """End the session and torch's default group, whatever state they are in. Waits at most ``wait_s`` for peers."""
    session = _session.current()
    if session is None:
        if dist.is_initialized() and wait_s is None:
            dist.destroy_process_group()
        return
    if session.member.forked:
        return  # It is the parent's group; its sockets are shared, so not even they may be ended here.
    # First of all, so that a signal handler that comes here in the middle finds nothing left to do.
    _session.set_current(None)
    limit = settings.read().destroy_timeout if wait_s is None else wait_s
    member = session.member
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
    if session.failed or member.verdict is not None:
        # Whatever torch's engine still waits for will not come; it must not hold up the end.
        session.cut()
    _end_torch()
    member.close()
    if session.beside is not None:
        # It ends by itself once every member is gone; others that are still busy keep it for a moment.
        session.beside.end(1.0) if member.verdict is None else session.beside.forget()
    for step in reversed(session.undo):
        step()


def _end_torch() -> None:
    """Destroy torch's default group in bounded time."""
    if not dist.is_initialized():
        return
    problems: list[BaseException] = []

    def run() -> None:
        try:
            dist.destroy_process_group()
        except Exception as problem:  # noqa: BLE001  # told below; an end goes on to its end
            problems.append(problem)

    thread = threading.Thread(target=run, name="allhands-destroy", daemon=True)
    thread.start()
    thread.join(_TORCH_END_S)
    if thread.is_alive():
        _log.warning("torch did not end its process group within %s; it is left behind", duration(_TORCH_END_S))
    for problem in problems:
        _log.warning("torch's destroy_process_group failed: %s: %s", type(problem).__name__, problem)


def _abandon(session: Session, problem: BaseException) -> None:
    """Give up a group that did not form, and tell the others."""
    if session.member.verdict is None:
        session.announce(problem)
    session.failed = True
    end(wait_s=0.0)


@contextmanager
def process_group(*args: Any, **kw: Any) -> Iterator[ProcessGroup]:
    """Form the default group for the length of a `with` block; takes what `init_process_group` takes.

    An exception that leaves the block is announced to the other ranks, whose pending calls raise PeerFailed.
    """
    init_process_group(*args, **kw)
    try:
        yield dist.group.WORLD  # type: ignore[misc]  # set once init_process_group has returned
    except BaseException as problem:
        session = _session.current()
        if session is not None and not (isinstance(problem, SystemExit) and not problem.code):
            session.announce(problem)
        raise
    finally:
        destroy_process_group()


# Uncaught exceptions and exits -----------------------------------------------------------------------------------


def _hook(session: Session, before: Callable[..., None]) -> None:
    """Announce an uncaught exception before the interpreter prints it, and leave in good order at exit.

    ``before`` is what stands in sys.excepthook again once the group is over.
    """
    inner = sys.excepthook

    def hook(kind: Any, problem: BaseException, trace: Any) -> None:
        if _session.current() is session:
            session.announce(problem)
        inner(kind, problem, trace)
        _print_cause(session, problem)

    sys.excepthook = hook
    session.undo.append(_restore(hook, before))
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
    end(wait_s=None if session.beside is not None else 0.0, how="exit")
