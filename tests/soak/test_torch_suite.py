"""torch's own tests of a backend, all of them, on ours."""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import leaks
from ranks.harness import PLAIN, STRANGERS

pytestmark = pytest.mark.soak

HERE = Path(__file__).parent
RUNNER = HERE / "torch_suite.py"

# Gatings of torch_suite.py, in this order: a test runs with the first one that allows it.
GATINGS = ("allhands", "gloo", "mpi", "open")

# Two at a time: each has three or four ranks.
SHARDS = 2

# Five times the duration of the longest shard on two idle cores; a single test that hangs ends long before.
DEADLINE_S = 1200


def test_every_test_of_torch_passes_or_has_a_reason(tmp_path: Path) -> None:
    """Each test passes, or is in torch_suite.toml with the reason; no test there passes."""
    exempt = tomllib.loads((HERE / "torch_suite.toml").read_text())
    names = run([], tmp_path).split()
    assert len(names) > 250
    reasons = {**exempt["fails"], **exempt["slow"]}
    assert not set(reasons) - set(names), "torch has no such tests"
    outcomes: dict[str, dict[str, Any]] = {name: {"outcome": "exempt"} for name in exempt["slow"]}
    begun = time.monotonic()
    for gating in GATINGS:
        left = [name for name in names if outcomes.get(name, {}).get("outcome", "skipped") == "skipped"]
        found = run_all(gating, left, tmp_path)
        assert set(found) == set(left), f"{gating}: no result of {sorted(set(left) - set(found))}"
        outcomes |= found
        counts = collections.Counter(
            "exempt" if name in reasons and each["outcome"] == "failed" else each["outcome"]
            for name, each in found.items()
        )
        print(f"\n{gating}: {dict(counts)} of {len(left)}", end="")  # noqa: T201  # these go into the documentation
    passed = {name for name, each in outcomes.items() if each["outcome"] == "passed"}
    print(  # noqa: T201
        f"\n{len(names)} tests, {len(passed)} passed, {len(reasons)} exempt, {time.monotonic() - begun:.0f} s"
    )
    bad = {name: each for name, each in outcomes.items() if name not in passed and name not in reasons}
    assert not bad, "\n".join(f"{name} {each['outcome']}: {each['why']}" for name, each in bad.items())
    assert not passed & set(reasons), "these pass now; take them out of torch_suite.toml"


def run_all(gating: str, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the tests ``names`` of ``gating``; return how each ended, by name."""

    def shard(number: int) -> list[dict[str, Any]]:
        report = folder / f"{gating}.{number}.jsonl"
        report.touch()
        run([gating, str(report), *names[number::SHARDS]], folder)
        return [json.loads(line) for line in report.read_text().splitlines()]

    with concurrent.futures.ThreadPoolExecutor(SHARDS) as pool:
        return {each["test"]: each for found in pool.map(shard, range(SHARDS)) for each in found}


def run(arguments: list[str], folder: Path) -> str:
    """Run torch_suite.py; return what it printed. Ends it with all its ranks at the deadline."""
    environment = {
        key: value for key, value in os.environ.items() if key not in PLAIN and not key.startswith(STRANGERS)
    }
    with (folder / f"{'-'.join(arguments[:1])}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, str(RUNNER), *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment | {"TMPDIR": str(folder)},
        )
        try:
            printed, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            leaks.end(process.pid)
            process.communicate()
            pytest.fail(f"torch_suite.py {arguments[:1]} did not end within {DEADLINE_S} s")
    assert process.returncode == 0, printed
    return printed
