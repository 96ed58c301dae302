"""torch's communication functions with the same signatures, whose failures are explained.

Each call is recorded while it runs (so that other ranks can be told what this one is doing), refused at once when the
group is over, and its engine's error is turned into a diagnosis.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from .. import _core, _torch
from ..engines.base import EngineFailure
from ..engines.dtypes import DTYPES, PREMUL_SUM, REDUCTIONS, operation_code
from ..errors import AllhandsError, fail
from ..observe import flight_recorder
from . import arguments, desync_check, engine_choice, failure
from . import session as _session
from .process_group import Group
from .session import begin_entry, positive_timeout
from .staging import resolve_conjugates
from .work import interruptible, wait_for_future

__all__ = [
    "FAST_PATH",
    "GUARDED",
    "P2POp",
    "Pending",
    "asking",
    "fast_path",
    "guarded",
    "monitored_barrier",
    "note_destroyed",
    "require_group",
    "torch_facts",
]

# The functions of torch.distributed that have a fast path; then all that communicate, as far as this torch has them.
FAST_PATH: tuple[str, ...] = tuple(arguments.TABLE)
GUARDED: tuple[str, ...] = (
    *FAST_PATH,
    "all_gather_coalesced",
    "all_gather_object",
    "batch_isend_irecv",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "split_group",
)

# Whether torch.compile is tracing: it replaces torch's own functions in its graph.
_compiling = torch.compiler.is_dynamo_compiling

# Where the last group was destroyed, for the error of a later call.
_destroyed_at = ""


def note_destroyed(site: str) -> None:
    """Store where the default group was destroyed, "" once there is a new one."""
    global _destroyed_at  # noqa: PLW0603  # one default group per process, as in torch
    _destroyed_at = site


def require_group(name: str) -> None:
    """Raise not-initialised or already-destroyed where there is no default group."""
    if dist.is_initialized():
        return
    if _destroyed_at:
        raise fail(
            "already-destroyed",
            f"{name} was called after the process group was destroyed",
            who="this process",
            why=f"destroy_process_group ran at {_destroyed_at}",
            fix="move the call before it, or form a new group with init_process_group",
        )
    raise fail(
        "not-initialised",
        f"{name} was called, but there is no process group yet",
        who="this process",
        why="init_process_group has not run in this process",
        fix="call allhands.init_process_group() first, or use `with allhands.process_group():`",
    )


class Pending(dist.Work):
    """An operation under way. `wait` raises the diagnosis where the engine fails.

    ``in_thread`` waits in another thread, where the engine does not notice the end of the group. ``entry`` is the
    operation's number in the flight recorder, 0 for none.
    """

    def __init__(
        self, work: Any, session: _session.Session, name: str, site: str, *, in_thread: bool = False, entry: int = 0
    ) -> None:
        super().__init__()
        self._entry = entry
        self._interruptible = in_thread
        self._work = work
        self._session = session
        self._name = name
        self._site = site

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done, at most ``timeout``."""
        if timeout is not None:
            # The caller's own limit: exceeding it does not end the operation, which stays open in the flight recorder.
            done = bool(self._work.wait(timeout))
            self._close(well=True)
            return done
        return bool(self._wait(self._work.wait))

    def _wait(self, wait: Callable[[], Any]) -> Any:
        if self._interruptible:
            wait = interruptible(self._session, wait)
        well = False
        try:
            result = _run(self._session, self._name, self._site, self._poll, wait)
            well = True
        finally:
            self._close(well=well)
        return result

    def _poll(self, wait: Callable[[], Any]) -> Any:
        """Wait in Python first where torch's own wait may miss the end of the group, then as torch does."""
        # torch's class is that of Gloo and NCCL. NCCL's abort ends its operations, and waiting is ordering there.
        if type(self._work) is dist.Work and not self._interruptible and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            wait_for_future(self._work, self._session)
        return wait()

    def _close(self, *, well: bool) -> None:
        """Close the operation's entry in the flight recorder, once."""
        if self._entry:
            flight_recorder.own().end(self._entry, well)
            self._entry = 0

    def synchronize(self) -> None:
        """Wait until the operation is done, as `wait` does."""
        self._wait(self._work.synchronize)

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        if not self._work.is_completed():
            return False
        self._close(well=True)
        return True

    def is_success(self) -> bool:
        """Return whether it succeeded."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return its failure, if any."""
        return self._work.exception()

    def result(self) -> Any:
        """Return its tensors."""
        return self._work.result()

    def get_future(self) -> Any:
        """Return it as a future."""
        return self._work.get_future()

    def source_rank(self) -> int:
        """Return the rank that sent what was received."""
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())  # noqa: SLF001  # torch's own object collectives call it so


def _run(session: _session.Session, name: str, site: str, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    before = session.enter(name, site)
    try:
        return function(*args, **kw)
    except AllhandsError:
        raise
    except (RuntimeError, EngineFailure) as problem:
        explained = failure.explain(session, problem, name, site)
        if explained is None:
            raise
        # The engine's message is a page of C++; it is chained only where no better cause is known.
        raise explained from (problem if explained.slug == "engine-failed" else None)
    finally:
        session.leave(before)


def _issue_and_poll(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` issued asynchronously and waited for in Python, so that signals interrupt the wait."""

    def call(*args: Any, **kw: Any) -> None:
        work = function(*args, **{**kw, "async_op": True})
        if not isinstance(work, dist.Work) or type(work).__name__ == "_IllegalWork":
            return  # Not a member of the group, or deferred to the end of a coalescing block.
        session = _session.current()
        if session is not None:
            wait_for_future(work, session)
        work.wait()

    return call


def _runs_signal_handlers() -> bool:
    """Return whether this thread runs signal handlers, and CUDA is not in use.

    With CUDA, torch orders asynchronous operations differently.
    """
    return threading.current_thread() is threading.main_thread() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _is_any_source(name: str, args: tuple[Any, ...], kw: dict[str, Any]) -> bool:
    """Return whether this is a receive from any source."""
    if name not in {"recv", "irecv"}:
        return False
    return len(args) < 2 and kw.get("src") is None and kw.get("group_src") is None


def _first_tensor(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the first tensor among ``values``, or in a list there; [] for none."""
    firsts = (value[0] if isinstance(value, list) and value else value for value in values)
    return [first for first in firsts if isinstance(first, torch.Tensor)][:1]


def _is_gloo_send(name: str, work: dist.Work) -> bool:
    """Return whether ``work`` is a send of Gloo, which may not notice that its connection ended.

    Of large sends under way when the group ends, one in ten or so waits until its timeout.
    """
    # torch's class; those of this package are subclasses and end with the group.
    return name in {"isend", "batch_isend_irecv"} and type(work) is dist.Work


def _torchs(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function behind one of `guarded`'s; anything else unchanged, for torch to refuse."""
    known = {dist.isend, dist.irecv}
    behind = inspect.unwrap(op, stop=lambda function: function in known)
    return behind if behind in known else op


class P2POp(dist.P2POp):
    """One operation for `batch_isend_irecv`. torch takes its own `isend` and `irecv` only, so ours are unwrapped."""

    def __new__(cls, op: Callable[..., Any], *args: Any, **kw: Any) -> Self:
        """Check the operation as torch does."""
        made: Self = super().__new__(cls, _torchs(op), *args, **kw)
        return made

    def __init__(self, op: Callable[..., Any], *args: Any, **kw: Any) -> None:
        super().__init__(_torchs(op), *args, **kw)


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Wait for every rank of the group, at most ``timeout``, and raise CollectiveTimeout with the missing ranks.

    Every rank of the group calls it. The error names the first missing rank, with ``wait_all_ranks`` all of them.
    torch's own refuses every backend that is not called "gloo".
    """
    chosen: Any = group if group is not None else dist.group.WORLD
    if chosen is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(chosen) == dist.Backend.GLOO:
        # torch reports to ranks outside the group, and has its own default timeout.
        return dist.monitored_barrier(group, timeout, wait_all_ranks)
    limit = positive_timeout(timeout)
    return chosen.monitored_barrier(*([limit] if limit is not None else []), wait_all_ranks=wait_all_ranks)


def guarded(name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return torch's function ``name``, or ``function`` in its place, with its failures explained."""
    if function is None:
        function = monitored_barrier if name == "monitored_barrier" else getattr(dist, name)
    if name.startswith("new_"):
        function = engine_choice.new_group(function)
    parameters = list(inspect.signature(function).parameters)
    group_place = parameters.index("group") if "group" in parameters else len(parameters)
    async_place = parameters.index("async_op") if "async_op" in parameters else -1
    polling = resolve_conjugates(_issue_and_poll(function))
    torchs, function = function, functools.wraps(function)(resolve_conjugates(function))

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        if _compiling():
            return torchs(*args, **kw)
        session = _session.current()
        if session is None:
            require_group(name)
            return function(*args, **kw)
        session.member.check_process()
        session.member.check()
        require_group(name)
        site = _session.call_site()
        group = kw.get("group", args[group_place] if len(args) > group_place else None) or dist.group.WORLD
        ours = isinstance(group, Group)
        tensor = _first_tensor((*args, *kw.values()))
        # Through Gloo or NCCL. Signals and the group's end interrupt a wait in shared memory.
        foreign = not ours or any(not each.is_cpu for each in tensor)
        in_thread = foreign and _is_any_source(name, args, kw)
        work: Callable[..., Any] = function
        if name in {"send", "recv"}:
            if in_thread or (foreign and _runs_signal_handlers()):
                work = interruptible(session, function)
        elif not ours and len(args) <= async_place and not kw.get("async_op") and _runs_signal_handlers():
            work = polling
        check = session.desync_checks.get(group)
        began = check.before(name, args, kw, site) if check is not None else None
        entry, well = 0, False
        if not ours:  # Ours record their calls themselves.
            entry = begin_entry(name, getattr(group, "group_name", ""), tensor, site)
            flight_recorder.own().run(entry, 0)
        try:
            result = _run(session, name, site, work, *args, **kw)
            well = True
            if name == "new_group" and isinstance(result, dist.ProcessGroup):
                desync_check.start(session, result)
        finally:
            if check is not None:
                check.after(began, well=well)
            pending = well and isinstance(result, dist.Work)
            if entry and not pending:
                flight_recorder.own().end(entry, well)
        if isinstance(result, dist.Work):
            return Pending(result, session, name, site, in_thread=in_thread or _is_gloo_send(name, result), entry=entry)
        if isinstance(result, list) and result and isinstance(result[0], dist.Work):
            return [Pending(work, session, name, site, in_thread=_is_gloo_send(name, work)) for work in result]
        return result

    return call


@functools.cache
def torch_facts() -> _core.TorchFacts:
    """Return what the core has to know of torch."""
    known = {code: op for op, code in REDUCTIONS.items()}
    return _core.TorchFacts(
        (torch.Tensor, torch.nn.Parameter),
        dict(DTYPES),
        tuple(known.get(code) for code in range(PREMUL_SUM)),  # each PREMUL_SUM is an object of its own
        dist.GroupMember,
        _torch.coalescing(),
        _session.call_site,
        _session.NOT_THE_USERS,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        _torch.world_place(),
        torch.empty(0).is_neg,
    )


def fast_path(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Return the C fast path of torch's function ``name``, which falls back to `guarded`.

    A ``function`` given in place of torch's has parameters of the same names.
    """
    function = function or getattr(dist, name)
    entry, names = arguments.TABLE[name], arguments.parameters(function)
    made = _core.FastPath(
        torch_facts(),
        guarded(name, function),
        name,
        names,
        arguments.roles(name, names),
        operation_code(entry.operation),
        entry.whole,
    )
    _torch.traced_as(made, function)
    return functools.update_wrapper(made, function)


def asking(name: str) -> Callable[..., Any]:
    """Return torch's function ``name``, a query about a group, with its error explained where there is no group."""
    function = engine_choice.named(dist.get_backend) if name == "get_backend" else getattr(dist, name)

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        try:
            return function(*args, **kw)
        except ValueError:
            require_group(name)
            raise

    return call
