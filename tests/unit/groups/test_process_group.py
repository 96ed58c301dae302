"""How a group runs its calls, on an engine that only records them."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allhands.engines.base import Capabilities
from allhands.errors import ArgumentError
from allhands.groups import process_group
from allhands.groups.process_group import Group
from unit.groups.fakes import FakeMember, make_session


class _Engine:
    """Records the deadline of each call; the first call waits until `release`."""

    capabilities = Capabilities(one_host=True)
    fast_path = None

    def __init__(self) -> None:
        self.release = threading.Event()
        self.limits_s: list[float] = []

    def sequence(self) -> int:
        return len(self.limits_s)

    def all_reduce(self, *arguments: int) -> None:
        self.limits_s.append(arguments[-1] / 1e9)
        assert self.release.wait(10)


@pytest.fixture
def engine() -> _Engine:
    """Return the engine of `group`."""
    return _Engine()


@pytest.fixture
def group(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Return a group of two ranks on ``engine`` whose calls may take 30 s."""
    monkeypatch.setattr(process_group._torch, "stand_behind", lambda *_: None)
    session, gloo, store = make_session(FakeMember()), SimpleNamespace(), dist.HashStore()
    return Group(0, [0, 1], engine=engine, gloo=gloo, session=session, timeout=timedelta(seconds=30), store=store)


def _all_reduce(group: Group, timeout_s: float | None = None) -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = True
    if timeout_s is not None:
        opts.timeout = timedelta(seconds=timeout_s)
    return group.allreduce([torch.ones(2)], opts)


def test_a_queued_call_keeps_its_own_deadline(group: Group, engine: _Engine) -> None:
    """The deadline of a call that runs later is that of its own arguments, not of the call that was made last."""
    works = [_all_reduce(group, 5.0), _all_reduce(group), _all_reduce(group, 7.0)]
    engine.release.set()
    for work in works:
        work.wait()
    assert engine.limits_s == [5.0, 30.0, 7.0]


def test_a_root_that_is_not_in_the_group_is_refused(group: Group, engine: _Engine) -> None:
    """The error names the rank; nothing reaches the engine."""
    opts = dist.BroadcastOptions()
    opts.rootRank = 2
    with pytest.raises(ArgumentError, match="there is no rank 2 in a group of 2"):
        group.broadcast([torch.ones(2)], opts)
    assert engine.limits_s == []
