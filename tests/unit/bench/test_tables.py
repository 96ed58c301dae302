"""How a bench is shown: its table, its legend, its picture."""

from __future__ import annotations

import importlib.util
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allhands.bench.collective import row
from allhands.bench.config import CollectiveConfig
from allhands.bench.operations import OPERATIONS
from allhands.bench.tables import collective_table, plot, size_text

SIZES = (4, 64 << 10, 256 << 20)
PLAN = CollectiveConfig("all_reduce", 4, SIZES, 3, ("gloo", "mpi"), floor=True)


def rows(plan: CollectiveConfig) -> list[dict[str, Any]]:
    """Return rows as if they had been measured: each engine twice as slow as the one before."""
    found = []
    for number, size in enumerate(plan.sizes):
        times = {
            name: [2**place * 1e-6 * 1000**number] * plan.rounds
            for place, name in enumerate(("allhands", *plan.peers, "memcpy", "stream"))
        }
        if not plan.floor or not size:
            del times["memcpy"], times["stream"]
        found.append({**row(plan, size, times, {"mpi": "Open MPI v4"}), "load_before": 0.5})
    return found


def test_the_table_is_aligned() -> None:
    """Every line of the table is as wide as its rule, and has a cell for each engine's figures and the floor's."""
    lines = collective_table(PLAN, rows(PLAN)).splitlines()
    body = lines[1 : lines.index("")]
    assert len({len(line) for line in body}) == 1
    first = body[2].replace("|", " ").split()
    assert first[:2] == ["4", "B"]
    assert first[2:5] == ["1.00", "1.00", "0.0060"]
    assert first[5:9] == ["2.00", "2.00", "0.0030", "2.00"]
    assert first[-2:] == ["-", "-"]
    assert body[-1].split()[:2] == ["256", "MiB"]
    assert body[-1].split()[-1] != "-"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_legend_defines_each_column(operation: str) -> None:
    """It states ranks, cores, the formula of the bus bandwidth and that of the floor, whatever the operation."""
    sizes = tuple(dict.fromkeys(OPERATIONS[operation].size(size, 4) for size in SIZES))
    plan = CollectiveConfig(operation, 4, sizes, 3, ("gloo", "mpi"), floor=True)
    text = collective_table(plan, rows(plan))
    assert f"4 ranks, {rows(plan)[0]['cores']} cores" in text
    assert "median, least: us per call of 3 rounds" in text
    assert "ratio: the peer's median over allhands'" in text
    assert "mpi: Open MPI v4" in text
    if OPERATIONS[operation].buffers:
        assert f"bus bandwidth as nccl-tests has it, {OPERATIONS[operation].bus.text};" in text
        assert OPERATIONS[operation].staged.text in text


def test_what_was_not_measured_is_not_explained() -> None:
    """Without peers and floor there is no column and no line about them."""
    plan = CollectiveConfig("broadcast", 2, (4,), 1)
    text = collective_table(plan, rows(plan))
    for word in ("gloo", "ratio", "floor", "stream"):
        assert word not in text


def test_size_words() -> None:
    """Sizes are in the largest unit that divides them."""
    found = [size_text(size) for size in (4, 1023, 1024, 1536, 1 << 20, 3 << 30)]
    assert found == ["4 B", "1,023 B", "1 KiB", "1,536 B", "1 MiB", "3 GiB"]


@pytest.mark.parametrize("plan", [PLAN, CollectiveConfig("barrier", 2, (0,), 1)], ids=["all_reduce", "barrier"])
def test_a_picture_is_drawn(tmp_path: Path, plan: CollectiveConfig) -> None:
    """The picture is a PNG, with a line for each engine."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed (pip install 'allhands[examples]')")
    target = tmp_path / "out.png"
    plot(plan, rows(plan), str(target))
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert target.stat().st_size > 5000


def test_a_bar_on_a_terminal() -> None:
    """On a terminal a bar shows operation, size and round; it goes to standard error only."""
    code = (
        "from allhands.bench.collective import progress_bar\nfrom allhands.bench.config import CollectiveConfig\n"
        "with progress_bar(CollectiveConfig('all_reduce', 2, (4, 1024), 2)) as notify: notify(1024, 1, 3)"
    )
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True
        )
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.stdout == b""
    assert "all_reduce 1 KiB, round 1 of 2" in shown
    assert "3/4" in shown
