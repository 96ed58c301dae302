"""torch's communication functions with the same signatures, whose failures say who and why.

Each call is noted while it runs (so that others can be told what this rank is doing), refused at once when
the group is known to be over, and its engine's error is turned into the diagnosis behind it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import session as _session
from .errors import AllhandsError, NotInitialised, error, fail

__all__ = ["GUARDED", "Pending", "asking", "guarded", "note_destroyed", "require_group"]

# Everything in torch.distributed that communicates. What a torch version does not have is left out.
GUARDED: tuple[str, ...] = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
)

# Where the last group was destroyed, for the message of whoever uses it afterwards.
_destroyed_at = ""


def note_destroyed(site: str) -> None:
    """Remember that the default group was destroyed at ``site`` ("" once there is a new one)."""
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
        f"{name} was called before there is a process group",
        who="this process",
        why="init_process_group has not run in this process",
        fix="call allhands.init_process_group() first, or use `with allhands.process_group():`",
    )


class Pending(dist.Work):
    """An operation under way. `wait` raises the diagnosis where the engine fails."""

    def __init__(self, work: Any, session: _session.Session, name: str, site: str) -> None:
        super().__init__()
        self._work = work
        self._session = session
        self._name = name
        self._site = site

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # torch's default is a constant
        """Wait until the operation is done, at most ``timeout``."""
        arguments = () if timeout is None else (timeout,)
        return bool(_run(self._session, self._name, self._site, self._work.wait, *arguments))

    def synchronize(self) -> None:
        """Wait until the operation is done, as `wait` does."""
        _run(self._session, self._name, self._site, self._work.synchronize)

    def is_completed(self) -> bool:
        """Tell whether the operation is done."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Tell whether it went well."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return what went wrong, if anything."""
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
        return int(self._work._source_rank())


def _run(session: _session.Session, name: str, site: str, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    before = session.enter(name, site)
    try:
        return function(*args, **kw)
    except AllhandsError:
        raise
    except RuntimeError as problem:
        explained = session.explain(problem, name, site)
        if explained is None:
            raise
        raise explained from problem
    finally:
        session.leave(before)


def guarded(name: str) -> Callable[..., Any]:
    """Return torch's function ``name`` with its failures explained."""
    function = getattr(dist, name)

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        session = _session.current()
        if session is None:
            require_group(name)
            return function(*args, **kw)
        if session.member.verdict is not None:
            raise error(session.member.verdict)
        if not dist.is_initialized():
            require_group(name)
        site = _session.call_site(sys._getframe(1))
        result = _run(session, name, site, function, *args, **kw)
        if isinstance(result, dist.Work):
            return Pending(result, session, name, site)
        if isinstance(result, list) and result and isinstance(result[0], dist.Work):
            return [Pending(work, session, name, site) for work in result]
        return result

    return call


def asking(name: str) -> Callable[..., Any]:
    """Return torch's function ``name``, which asks about a group, with its "no group" explained."""
    function = getattr(dist, name)

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        try:
            return function(*args, **kw)
        except NotInitialised:
            raise
        except ValueError:
            require_group(name)
            raise

    return call
