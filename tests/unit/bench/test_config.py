"""What the options of a bench are understood as, and which are refused before anything starts."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from allhands import cli
from allhands.bench import processes
from allhands.bench.config import (
    CollectiveConfig,
    check_memory,
    collective_config,
    memory_needed,
    parse_peers,
    parse_sizes,
)
from allhands.errors import AllhandsError

MIB = 1 << 20


def call(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(cli.main, ["bench", *arguments], prog_name="allhands", catch_exceptions=False)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose options were not refused: they would start processes."""

    def start(*_: object) -> None:
        raise AssertionError("the ranks were started")

    monkeypatch.setattr(processes.RankProcesses, "_start", start)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4", [4]),
        ("4,1K,1M", [4, 1024, MIB]),
        ("4:64", [4, 16, 64]),
        ("4:100", [4, 16, 64, 100]),
        ("1k:1g", [1024 << shift for shift in range(0, 21, 2)]),
        ("8M:8M", [8 * MIB]),
        (" 16 , 2K ", [16, 2048]),
    ],
)
def test_sizes(text: str, found: list[int]) -> None:
    """A list is taken as it is; a range has each size four times the one before, and its end."""
    assert parse_sizes(text) == found


@pytest.mark.parametrize("text", ["", "x", "4:", "1:2:3", "64:4", "0", "-4", "1T", "1.5K", "K", "4,,8", "3"])
def test_sizes_that_are_none(text: str) -> None:
    """Nonsense is refused with an example of what is meant."""
    with pytest.raises(AllhandsError) as caught:
        parse_sizes(text)
    assert caught.value.slug == "invalid-argument"
    assert "4:64M" in str(caught.value)


def test_peers_come_in_one_order() -> None:
    """However they are written, peers are measured and shown in one order, each once."""
    assert parse_peers("gloo") == ("gloo",)
    assert parse_peers(" MPI,gloo,mpi") == ("gloo", "mpi")
    assert parse_peers("none") == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_reduce", "--against", "glo"], "there is no peer 'glo'; did you mean 'gloo'?"),
        (["all_reduce", "--against", ""], "there is no peer ''"),
        (["all_reduce", "--against", "none,gloo"], "there is no peer 'none'"),
        (["all_reduce", "--sizes", "64:4"], "'64:4' is not a range of sizes"),
        (["send_recv", "--ranks", "1"], "--ranks"),
        (["all_reduce", "--ranks", "257"], "--ranks"),
        (["all_reduce", "--rounds", "0"], "--rounds"),
        (["all_reduce", "--sizes", "4:100000G"], "GiB are available"),
        (["all_redcue"], "Did you mean 'all_reduce'?"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense(arguments: list[str], words: str) -> None:
    """A bench that cannot be is refused with status 2 and the reason, before a process is started."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_memory_is_counted_for_all_ranks() -> None:
    """What is needed grows with ranks, with what peers hold besides, and with the floor's two buffers."""
    size = 256 * MIB
    base = CollectiveConfig("all_reduce", 4, (4, size), 5)
    more = [
        memory_needed(base),
        memory_needed(CollectiveConfig("all_reduce", 4, (4, size), 5, ("gloo",))),
        memory_needed(CollectiveConfig("all_reduce", 4, (4, size), 5, ("gloo",), floor=True)),
    ]
    assert [after - before for before, after in itertools.pairwise(more)] == [4 * size, 8 * size]
    assert memory_needed(CollectiveConfig("all_to_all", 4, (size,), 5)) - memory_needed(base) == 4 * size
    check_memory(base, available=memory_needed(base))
    with pytest.raises(AllhandsError, match="on 4 ranks needs about"):
        check_memory(base, available=memory_needed(base) - 1)


def test_sizes_are_whole_numbers_for_every_rank() -> None:
    """Operations on parts round up to one element for each rank, and measure no size twice."""
    asked = {"ranks": 4, "sizes_text": "4:1K", "against": "none", "rounds": 1}
    assert collective_config("all_reduce", **asked).sizes == (4, 16, 64, 256, 1024)  # type: ignore[arg-type]  # mixed values
    assert collective_config("all_gather", **asked).sizes == (16, 64, 256, 1024)  # type: ignore[arg-type]
    assert collective_config("barrier", **asked).sizes == (0,)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_no_mpi_says_what_to_type(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Where MPI is asked for and not here, the error has the commands that install it."""
    which, find = shutil.which, importlib.util.find_spec
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else which(name) or "/usr/bin/mpirun")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name) or True)
    for asked in (("--against", "gloo,mpi"), ("--engine", "mpi", "--against", "none")):
        result = call("all_reduce", *asked)
        assert result.exit_code == 1
        assert "[mpi-missing]" in result.stderr
        assert f"{missing} cannot be found" in result.stderr
        for command in ("apt-get install openmpi-bin libopenmpi-dev", "pip install 'allhands[mpi]'", "make mpi"):
            assert command in result.stderr


def test_a_plot_that_cannot_be_drawn_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No matplotlib, no folder, or an ending that is no picture's: said before minutes are spent on measuring."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "matplotlib" else find(name))
    for path in (tmp_path / "out.txt", tmp_path / "nowhere" / "out.png"):
        result = call("all_reduce", "--plot", str(path))
        assert result.exit_code == 2
        assert "is not a file that can be written" in result.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = call("all_reduce", "--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr


def test_the_command_needs_no_torch() -> None:
    """The modules of the command's own process do not import torch; only ranks do."""
    modules = ("collective", "processes", "operations", "config", "tables", "training", "launch", "rollcall")
    code = f"import sys, {', '.join(f'allhands.bench.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
