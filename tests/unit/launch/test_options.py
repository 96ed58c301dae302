from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from allhands.environments.world import Address
from allhands.launch.command import command
from allhands.launch.options import OPTIONS, Job, Streams, make_job, read_plain


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return a script."""
    path = tmp_path / "train.py"
    path.write_text("pass")
    return str(path)


def job(*line: str) -> Job:
    """Return the job that a command line describes."""
    made: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allhands.launch.command.run_job", lambda job: made.append(job) or 0)
        command.main(list(line), standalone_mode=False)
    return made[0]


def test_defaults(script: str) -> None:
    """Without options: one rank, a random name, everything as torchrun has it."""
    found = job(script, "--lr", "1", "-n", "3")
    assert (found.target, found.arguments, found.local_world_size, found.kind) == (
        script,
        ("--lr", "1", "-n", "3"),
        1,
        "script",
    )
    assert found.name.startswith("run-")
    assert found.name != job(script).name


def test_torchrun_spellings(script: str) -> None:
    """Dashes and underscores, equals signs and spaces, short and long mean the same."""
    one = job("--nproc_per_node=2", "--max_restarts", "3", "--rdzv_id=x", "-t", "3", "-r", "1:1", script)
    two = job("--nproc-per-node", "2", "--max-restarts=3", "--rdzv-id", "x", "--tee=3", "--redirects=1:1", script)
    assert one == two
    assert one.streams == (Streams(0, 3), Streams(1, 3))
    assert (one.max_restarts, one.name, one.world_size) == (3, "x", 2)


def test_pet_variables(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_ variables replace options that are not given."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    monkeypatch.setenv("PET_STANDALONE", "1")
    found = job("--max-restarts", "1", script)
    assert (found.local_world_size, found.max_restarts) == (3, 1)


def test_several_nodes(script: str) -> None:
    """Nodes, coordinator and ranks; node 0 chooses the port of torch's own store, unless one is given."""
    found = job("--nnodes", "2:2", "--node-rank", "1", "-n", "4", "--coordinator", "node-a:4000", script)
    assert (found.nodes, found.world_size, found.rank(2)) == (2, 8, 6)
    assert (found.coordinator, found.master) == (Address("node-a", 4000), None)
    given = job("--nnodes=2", "--coordinator=a:1", "--master-addr=b", "--master-port=2", script)
    assert (given.coordinator, given.master, given.node_rank) == (Address("a", 1), Address("b", 2), -1)
    same = job("--nnodes=2", "--node_rank=0", "--master_addr=[::1]", "--master_port=4000", script)
    assert same.coordinator == Address("::1", 4000)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ([], 600.0),
        (["--timeout", "5"], 5.0),
        (["--rdzv-conf", "last_call_timeout=1,join_timeout=30"], 30.0),
        (["--rdzv_conf=timeout=900"], 900.0),
        (["--rdzv-conf", "join_timeout=30", "--timeout", "2.5"], 2.5),
    ],
)
def test_timeout(script: str, line: list[str], seconds: float) -> None:
    """--timeout, or torchrun's timeouts in --rdzv-conf."""
    assert job(*line, script).timeout_s == seconds


@pytest.mark.parametrize(("number", "count"), [("cpu", None), ("auto", None), ("7", 7)])
def test_nproc_per_node(script: str, number: str, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cpu counts cores, auto GPUs or else cores."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = len(os.sched_getaffinity(0))
    assert job("-n", number, script).local_world_size == (count or cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert job("-n", "gpu", script).local_world_size == 2
    assert job("-n", "auto", script).local_world_size == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["-n", "0"], "0 ranks are too few"),
        (["-n", "many"], "'many' is neither a number nor one of cpu, gpu, auto"),
        (["-n", "gpu"], "no GPU is visible here"),
        (["--nnodes", "1:2"], "a fixed number of nodes"),
        (["--nnodes", "0"], "at least 1 node"),
        (["--nnodes", "x"], "'x' is not a number of nodes"),
        (["--nnodes", "2"], "need --coordinator HOST:PORT"),
        (["--timeout", "0"], "0.0 is not a number of seconds above 0"),
        (["--rdzv-conf", "timeout=soon"], "'soon' is not a number of seconds"),
        (["--nnodes", "2", "--coordinator", "a:1", "--node-rank", "2"], "not between 0 and 1"),
        (["--nnodes", "2", "--coordinator", "a", "--node-rank", "1"], "is not an address"),
        (["--rdzv-backend", "etcd"], "'etcd' is not known"),
        (["--restart-if", "signal,luck"], "'luck' is none of any,"),
        (["--max-restarts", "-1"], "less than 0"),
        (["--tee", "5"], "'5' is neither 0, 1, 2 or 3"),
        (["--tee", "1:1"], "there is no local rank 1 of 1"),
        (["--local-ranks-filter", "3"], "is not a list of local ranks below 1"),
        (["--master-port", "70000"], "70000 is not a port"),
        (["--init", "--no-python"], "no group to form"),
        (["--nproc-per-nod", "1"], "Did you mean '--nproc-per-node'"),
    ],
)
def test_usage_errors(script: str, line: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake is a usage error that names the option and the reason."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(click.UsageError) as caught:
        job(*line, script)
    assert words in caught.value.format_message()


def test_missing_targets(tmp_path: Path, script: str) -> None:
    """A missing script and a program that cannot run are refused before anything starts."""
    cases: list[tuple[list[str], str]] = [
        ([str(tmp_path / "trian.py")], "Did you mean"),
        (["--no-python", "no-such-program"], "was not found"),
        (["--no-python", script], "is not executable"),
        ([], "Missing argument 'SCRIPT'"),
    ]
    for line, words in cases:
        with pytest.raises(click.UsageError) as caught:
            job(*line)
        assert words in caught.value.format_message()


def test_log_dir_alone_keeps_both_streams(script: str) -> None:
    """--log-dir without --tee or --redirects keeps both streams of every rank."""
    found: Any = job("-n", "2", "--log-dir", "logs", script)
    assert found.streams == (Streams(0, 3), Streams(0, 3))


# The reader without click ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["-n", "3"],
        ["--nproc_per_node=2", "--max-restarts", "4", "--fold", "--no-prefix"],
        ["--nproc-per-node", "2", "-r", "1:1", "--tee=3", "--log-dir", "logs"],
        ["--nnodes=2", "--node-rank", "1", "--coordinator", "[::1]:4000", "--timeout", "2.5"],
        ["--standalone", "--master-port", "4000", "--role", "trainer", "--hang-timeout=7", "--grace", "0"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint", "a:1", "--report", "r.json", "--init"],
    ],
)
def test_read_plain_agrees_with_click(line: list[str], script: str) -> None:
    """Both readers make the same job, and leave the script its arguments."""
    whole = ["--rdzv-id", "x", *line, script, "--lr", "1", "-n", "9"]
    found = read_plain(whole, {})
    assert found is not None
    assert make_job(*found) == job(*whole)


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["-n"],
        ["--help", "x.py"],
        ["-h"],
        ["-n2", "x.py"],
        ["-n=2", "x.py"],
        ["--fold=1", "x.py"],
        ["--nproc", "2", "x.py"],
        ["--max-restarts", "some", "x.py"],
        ["--", "x.py"],
    ],
)
def test_read_plain_declines(line: list[str]) -> None:
    """Help, mistakes, rarer spellings and any PET_ variable are left to click."""
    assert read_plain(line, {}) is None
    assert read_plain(["x.py"], {"PET_NNODES": "1"}) is None


def test_both_readers_have_the_same_options() -> None:
    """Click's command has exactly the options of the table, with the same defaults."""
    by_click = {each.name: each.default for each in command.params if isinstance(each, click.Option)}
    assert by_click == {option.key: option.default for option in OPTIONS}
