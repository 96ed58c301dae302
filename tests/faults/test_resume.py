"""A job that is killed and resumes with other numbers of ranks."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import harness

pytest.importorskip("sklearn", reason="the digits example needs the extra 'examples'")

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SAMPLES, STEPS = 1440, 24  # in an epoch
# Each runs for seconds; this only ends a hang on a loaded machine.
DEADLINE_S = 150


def digits(ranks: int, epochs: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example under the launcher, from the checkpoint in ``folder`` if there is one."""
    return subprocess.run(
        [sys.executable, "-m", "allhands", "run", "-n", str(ranks), "--no-prefix", DIGITS, "--epochs", str(epochs),
         "--trace", "--report", folder / "report.json", "--checkpoint", folder / "digits.pt", *options],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=harness.environment({}),
    )  # fmt: skip


def history(folder: Path) -> dict[str, Any]:
    """Return the report of the job over all its runs."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def check(folder: Path, epochs: int, reference: list[float]) -> None:
    """Fail unless every epoch had every sample once, and the losses are those of a job that was never killed."""
    found = history(folder)
    assert {epoch: sorted(samples) for epoch, samples in found["seen"].items()} == {
        str(epoch): list(range(SAMPLES)) for epoch in range(epochs)
    }
    assert len(found["losses"]) == epochs * STEPS
    for ours, theirs in zip(found["losses"], reference, strict=True):
        # The same mathematics, rounded in another order.
        assert ours == pytest.approx(theirs, rel=0.1, abs=0.02)
    assert len(found["accuracies"]) == epochs


def killed_and_resumed(folder: Path, lives: list[tuple[int, int]], last: int, epochs: int) -> None:
    """Run the job with each number of ranks until one is killed after a number of steps; finish with ``last`` ranks."""
    for ranks, steps in lives:
        done = digits(ranks, epochs, folder, "--every", "5", "--kill-at", str(steps))
        assert done.returncode == 128 + signal.SIGKILL, done.stderr
    done = digits(last, epochs, folder)
    assert done.returncode == 0, done.stderr


def test_each_sample_once_after_a_kill(tmp_path: Path) -> None:
    """Killed at a random step and resumed with another world size: each sample once per epoch, and the same losses."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    done = digits(1, 2, whole)
    assert done.returncode == 0, done.stderr
    steps = random.randrange(6, 2 * STEPS)  # noqa: S311  # another one each time
    killed_and_resumed(parts, [(3, steps)], 2, 2)
    check(parts, 2, history(whole)["losses"])


@pytest.mark.soak
def test_several_failures(tmp_path: Path) -> None:
    """The same with several failures and world sizes, some before the first checkpoint of a run."""
    whole = tmp_path / "whole"
    whole.mkdir()
    assert digits(1, 3, whole).returncode == 0
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        # At most 57 steps are behind the checkpoints of three lives, of 72: each of them has something to die in.
        lives = [(random.choice([1, 2, 3, 4]), random.randrange(1, 20)) for _ in range(3)]  # noqa: S311
        killed_and_resumed(folder, lives, random.choice([2, 3, 5]), 3)  # noqa: S311
        check(folder, 3, history(whole)["losses"])
