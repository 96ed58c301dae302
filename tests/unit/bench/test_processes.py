"""The ranks of a bench leave nothing behind, whatever happens while they are ended."""

from __future__ import annotations

import os

import pytest

from allhands.bench import processes
from allhands.bench.config import CollectiveConfig


def test_a_rank_that_ends_while_it_is_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of mpirun that is gone between being looked at and being killed keeps nothing else from its end."""

    def gone(*_: object) -> None:
        raise ProcessLookupError

    made = processes.RankProcesses(CollectiveConfig("all_reduce", 2, (4,), 1, ("mpi",)))
    made.pids = {0: os.getpid()}
    monkeypatch.setattr(processes, "_ours", lambda *_: True)
    monkeypatch.setattr(os, "kill", gone)
    made._end()
    assert not made._folder.exists()
    assert made._listener.fileno() == -1


def test_a_stranger_with_a_name_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that was given to another process, whatever its command line is, is not one of ours."""
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: b"\xff\xfe\0")
    assert not processes._ours(os.getpid(), "/tmp/allhands-bench")
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: b"python\0/tmp/allhands-bench/rank\0")
    assert processes._ours(os.getpid(), "/tmp/allhands-bench")
