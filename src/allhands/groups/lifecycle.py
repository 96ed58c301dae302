"""The life of the default group: form it, hold it for a block, destroy it. What torch's functions of these names do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
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
from ..engines.cuda import nccl
from ..engines.needs import needs
from ..errors import AllhandsError, error, fail
from ..observe import flight_recorder, stacks
from . import desync_check, engine_choice, registration
from . import session as _session
from .bootstrap import Bootstrap, bootstrap
from .collectives import note_destroyed
from .ending import abandon, end, hook
from .forming import check_timeout, current_device, default_backend, form_by, not_formed, prepare
from .session import Session, call_site

__all__ = [
    "attend",
    "destroy_process_group",
    "forming",
    "init_process_group",
    "process_group",
]

# How long ranks may take to come where the caller gives no timeout. Schedulers start nodes minutes apart;
# torch's half an hour is longer than anyone looks at a screen.
_DEFAULT_ROLL_CALL_S = 600.0

# How long before the deadline whoever finds a host's ports shut says so: at the deadline itself the group's end would
# come first, which does not know why.
_TELL_S = 0.5

# What is left of the deadline for torch to connect the group, at least.
_LEAST_CONNECT_S = 0.3

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
    registration.register()
    name = str(backend).lower() if backend is not None else ""
    if name == "fake":
        # torch's stand-in for tests: nothing is started and nobody comes.
        dist.init_process_group(backend, world_size=world_size, rank=rank, store=store)
        return
    told, engine = engine_choice.split(backend)
    limit = check_timeout(timeout)
    started = time.monotonic()
    deadline = started + (limit.total_seconds() if limit is not None else _DEFAULT_ROLL_CALL_S)
    end(wait_s=0.0)  # What torch's own destroy_process_group left of an earlier group.
    found = bootstrap(
        init_method, store, rank=rank, world_size=world_size, generation=_generation + 1, deadline=deadline
    )
    device = current_device(device_id)
    session = _attend(found, name, device, deadline, limit or _torch.default_timeout(name or "gloo"))
    before = sys.excepthook  # torch puts its own in its place and never takes it off
    more: dict[str, Any] = {} if _ranks is None else {"_ranks": _ranks}  # not there in every torch
    chosen = told if told is not None else default_backend()

    def form() -> None:
        _forming.now = True
        try:
            with engine_choice.asking_for(engine):
                dist.init_process_group(
                    backend=chosen,
                    store=session.store,
                    rank=found.world.rank,
                    world_size=found.world.world_size,
                    timeout=session.timeout,
                    group_name=group_name,
                    pg_options=pg_options,
                    device_id=device_id,
                    **more,
                )
        finally:
            _forming.now = False

    session.enter("init_process_group", session.formed_at)
    session.connections.probe_until = None if session.one_host else deadline - _TELL_S
    try:
        prepare(session, name, found.world.local_world_size)
        _torch.forget_failed_groups()
        if "nccl" in chosen:
            form()  # The current GPU belongs to the thread.
        else:
            form_by(max(deadline, time.monotonic() + _LEAST_CONNECT_S), session, form)
        desync_check.start(session, dist.group.WORLD)
    except Exception as problem:  # noqa: BLE001  # raised again as what it means
        explained = not_formed(session, name, problem)
        abandon(session, explained)
        raise explained from (problem if explained.slug == "engine-failed" else None)
    except BaseException as problem:
        abandon(session, problem)
        raise
    finally:
        session.connections.probe_until = None
        session.leave(None)
    hook(session, before)
    note_destroyed("")


def attend(store: Store, rank: int, world_size: int, timeout: timedelta) -> Session:
    """Hold the roll call for a group that torch itself is forming, with torch's store as the place to meet."""
    deadline = time.monotonic() + timeout.total_seconds()
    found = bootstrap(None, store, rank=rank, world_size=world_size, generation=_generation + 1, deadline=deadline)
    session = _attend(found, "allhands", None, deadline, timeout)
    try:
        prepare(session, "allhands", found.world.local_world_size)
    except BaseException as problem:
        abandon(session, problem)
        raise
    hook(session, sys.excepthook)
    return session


def _attend(found: Bootstrap, name: str, device: torch.device | None, deadline: float, timeout: timedelta) -> Session:
    """Answer the roll call; return the session of the complete group."""
    global _generation  # noqa: PLW0603  # counts for this process, as torch's group counter does
    # Only what the other ranks take part in counts: a rank that did not get this far must not fall out of step.
    _generation += 1
    world = found.world
    # From here on this rank may have to wait for others, and somebody may want to know where it stands.
    stacks.register()
    flight_recorder.set_rank(world.rank, world.world_size)
    trouble = (
        found.trouble.diagnosis if found.trouble is not None else needs(name, world.world_size, world.rank, device)
    )
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
    seat = answer_roll_call(world, claim, settings=read, deadline=deadline, rendezvous=found.board)
    session = Session(seat, timeout, call_site())
    _session.set_current(session)
    return session


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """End ``group``, or with None (or WORLD) the default group and everything that was made from it.

    Safe at any time: before init, twice, after a failure, in a signal handler, at exit. Waits for the other
    ranks to come here too, at most ALLHANDS_DESTROY_TIMEOUT seconds (5), and then says who was still busy. Raises
    CollectiveMismatch, once all is ended, where ranks made different calls and this is the first that is heard of it.
    """
    if isinstance(group, int):
        return  # dist.GroupMember.NON_GROUP_MEMBER, which new_group gives to whoever is not in the group.
    if group is not None and group is not dist.group.WORLD:
        if group in _torch.groups():
            session = _session.current()
            if session is not None:
                desync_check.stop(session, group)
            dist.destroy_process_group(group)
        return
    site = call_site()
    had = dist.is_initialized()
    late = end()
    if had:
        note_destroyed(site)
    if late is not None:
        raise error(late)


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
        if session is None or (isinstance(problem, SystemExit) and not problem.code):
            raise
        # Code that calls torch directly (DDP) raises torch's "connection closed"; the block knows better.
        explained = session.explain(problem, "the block", session.formed_at)
        session.announce(explained or problem)
        # What the problem says already is not said a second time.
        known = isinstance(problem, AllhandsError) and explained and explained.diagnosis == problem.diagnosis
        if explained is None or known:
            raise
        raise explained from problem
    finally:
        destroy_process_group()
