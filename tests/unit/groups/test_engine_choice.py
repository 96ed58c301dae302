"""How the name of an engine of ours reaches the making of a group."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.errors import ArgumentError
from allhands.groups import engine_choice


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None) -> tuple[Any, ...]:
    """Return the arguments, in the order of torch's function."""
    return ranks, timeout, backend, pg_options


def test_new_group_takes_the_name_of_an_engine() -> None:
    """By name or position; other backends and their options are passed on as they are."""
    made = engine_choice.new_group(new_group)
    assert made([0], backend="mpi") == ([0], None, "allhands", "mpi")
    assert made([0], None, "MPI") == ([0], None, "allhands", "mpi")
    assert made([0], backend="gloo", pg_options=3) == ([0], None, "gloo", 3)
    assert made() == (None, None, None, None)
    with pytest.raises(ArgumentError, match="mpi cannot be one of several backends"):
        made(backend="cpu:mpi,cuda:nccl")


@pytest.mark.parametrize(
    ("wanted", "setting", "engine"), [("", "", "shm"), ("", "gloo", "gloo"), ("mpi", "", "mpi"), ("mpi", "gloo", "mpi")]
)
def test_rank_0_decides(monkeypatch: pytest.MonkeyPatch, wanted: str, setting: str, engine: str) -> None:
    """Its caller's choice counts, then its setting; the other ranks read that."""
    store: dict[str, Any] = {}

    class Store:
        def set(self, key: str, value: str) -> None:
            store[key] = value.encode()

        def get(self, key: str) -> bytes:
            return bytes(store[key])

    made: Any = Store()
    monkeypatch.setenv("ALLHANDS_ENGINE", setting)
    assert engine_choice.chosen(made, 0, wanted) == engine
    monkeypatch.setenv("ALLHANDS_ENGINE", "nothing")
    assert engine_choice.chosen(made, 1, "") == engine
    with pytest.raises(ArgumentError, match="ALLHANDS_ENGINE='nothing' names no engine"):
        engine_choice.chosen(made, 0, "")
