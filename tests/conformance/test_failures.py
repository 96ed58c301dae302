"""Every failure on every engine: an error on every rank that waits, at once, naming the culprit."""

from __future__ import annotations

import re

import pytest

from conformance.engines import FORM, OnEngine, check
from ranks import harness

__all__ = ["MISMATCHES", "mismatched"]

MISMATCHES = {
    "count": ("dist.all_reduce(torch.ones(5))", "dist.all_reduce(torch.ones(6))"),
    "dtype": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4, dtype=torch.int32))"),
    "operation": ("dist.all_reduce(torch.ones(4))", "dist.broadcast(torch.ones(4), 0)"),
    "root": ("dist.broadcast(torch.ones(4), 0)", "dist.broadcast(torch.ones(4), 1)"),
    "reduction": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)"),
    "barrier": ("dist.barrier()", "dist.all_reduce(torch.ones(400_000))"),
    "gather": ("dist.all_gather([torch.ones(3)] * size, torch.ones(3))", "dist.reduce(torch.ones(3), 0)"),
    "size": (
        "dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(3))",
        "dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2))",
    ),
    "rooted": ("dist.reduce(torch.ones(3), 0)", "dist.scatter(torch.ones(3), None, 0)"),
}

# A deadline, not a figure: an error is immediate on an idle machine and later on a loaded one.
AT_ONCE_S = 5.0


def mismatched(results: list[harness.Result]) -> str:
    """Assert that every rank got a mismatch at once, with the same ranks; return the message on rank 0."""
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["seconds"] < AT_ONCE_S
        assert result["found"]["ranks"] == results[0]["found"]["ranks"]
    return str(results[0]["found"]["text"])


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_raises_on_every_rank(engine: OnEngine, kind: str) -> None:
    """Ranks that call different things all get collective-mismatch within a second or so, with what each called.

    A rank that needs nothing from the others may be through with its call, and is told at the next one.
    """
    usual, odd = MISMATCHES[kind]
    results = engine.launch(
        FORM
        + f"""
dist.barrier()
found = attempt(lambda: {odd} if rank == 2 else {usual})
if not found["kind"]:
    assert {kind!r} in ("operation", "root", "gather", "rooted")
    found = attempt(dist.barrier)
say(found=found)
""",
        3,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["seconds"] < 3
        assert "script.py:" in result["found"]["text"]
    assert {tuple(result["found"]["ranks"]) for result in results} == {(2,)}


def test_a_missing_rank_is_named_at_the_deadline(engine: OnEngine) -> None:
    """At the timeout the rank that skipped the call is named, with the line it is at instead."""
    results = engine.launch(
        FORM
        + """
import datetime, os, time
x = torch.ones(10)
dist.all_reduce(x)
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=2))
if rank == 1:
    while not all(os.path.exists(f"{os.environ['GATES']}/told.{each}") for each in (0, 2)):
        time.sleep(0.05)
else:
    say(found=attempt(lambda: dist.all_reduce(x)))
    gate("told", 2)
""",
        3,
    )
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "collective-timeout"
        assert result["found"]["ranks"] == [1]
        assert "script.py" in result["found"]["text"]
        assert re.search(r"^all_reduce did not finish within [2-9]", result["found"]["text"])
        # A word that torch's own backend tests match.
        assert " timeout " in result["found"]["text"]


def test_a_forked_child_and_an_invalid_root_are_refused(engine: OnEngine) -> None:
    """Neither may use the segment: a child would act as its parent, and such a root is no rank."""
    results = engine.launch(
        FORM
        + """
import os
found = {
    "broadcast": attempt(lambda: dist.broadcast(torch.ones(3), size + 3)),
    "reduce": attempt(lambda: dist.reduce(torch.ones(3), size + 3)),
}
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    slugs = [attempt(lambda: library.all_reduce(torch.ones(3))).get("slug") for library in (dist, torch_dist)]
    os.write(writer, repr(slugs).encode())
    os._exit(0)
os.waitpid(child, 0)
say(found=found, child=os.read(reader, 1000).decode())
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [size] * 3
""",
        2,
    )
    check(results)
    for result in results:
        assert {found["kind"] for found in result["found"].values()} <= {"ArgumentError", "ValueError"}
        assert result["child"] == "['forked-process', 'forked-process']"


def test_a_killed_rank_ends_the_call_of_the_others(engine: OnEngine) -> None:
    """Survivors of a kill -9 raise peer-lost with its rank within a second or so."""
    results = engine.launch(
        FORM
        + """
import os, time
x = torch.ones(100_000)
dist.all_reduce(x)
if rank == 1:
    time.sleep(0.3)
    say(fell=time.time())
    os.kill(os.getpid(), 9)
say(found=attempt(lambda: dist.all_reduce(x)), told=time.time())
""",
        3,
    )
    for result in (results[0], results[2]):
        assert (result["found"]["slug"], result["found"]["ranks"]) == ("peer-lost", [1])
        assert result["told"] - results[1]["fell"] < AT_ONCE_S


@pytest.mark.parametrize("odd", ["torch.ones(5)", "torch.sparse_coo_tensor([[0]], [1.0], (6,))"], ids=["dense", "size"])
def test_a_sparse_mismatch(engine: OnEngine, odd: str) -> None:
    """A sparse tensor meets a dense one, or one of another size: a mismatch on every rank, not a hang."""
    results = engine.launch(
        FORM
        + f"""
x = {odd} if rank == 2 else torch.sparse_coo_tensor([[0]], [1.0], (5,))
say(found=attempt(lambda: dist.all_reduce(x)))
""",
        3,
    )
    assert "all_reduce through Gloo of float32" in mismatched(results)
    assert results[0]["found"]["ranks"] == [2]
