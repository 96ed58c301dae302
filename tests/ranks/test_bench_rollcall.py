"""The roll call's measurement, small: a real coordinator's process and members over real sockets."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Literal

import pytest

from allhands.bench import rollcall_table, run
from allhands.errors import AllhandsError


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_small_roll_call_is_measured(transport: Literal["tcp", "unix"]) -> None:
    """Every figure is there and positive, the progress names each phase, and the table holds the row."""
    said: list[str] = []
    (row,) = run([40], 1, transport=transport, notify=said.append)
    assert (row["members"], row["transport"]) == (40, transport)
    assert all(row[f"{name}_s"] > 0 for name in ("rollcall", "store", "death", "leave"))
    assert row["coordinator_rss_after_kib"] >= row["coordinator_rss_before_kib"] > 0
    for phase in ("rollcall", "store", "death", "leave"):
        assert any(line.endswith(f": {phase}") for line in said)
    assert "40" in rollcall_table([row])


def test_too_few_descriptors_are_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not allow that many sockets is told so before anything is started."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(AllhandsError) as caught:
        run([4096], 1)
    assert caught.value.slug == "fd-limit"


@pytest.mark.parametrize(("members", "rounds"), [(1, 1), (0, 1), (8, 0)])
def test_senseless_numbers_are_refused(members: int, rounds: int) -> None:
    """A job of one member, or no round at all, measures nothing."""
    with pytest.raises(AllhandsError) as caught:
        run([members], rounds)
    assert caught.value.slug == "invalid-argument"


def test_needs_no_torch() -> None:
    """Measuring the control plane does not import torch, so that its memory is not counted."""
    code = "import allhands.bench.rollcall, allhands.bench.simulated_members, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
