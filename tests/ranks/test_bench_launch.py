from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ranks import harness


@pytest.mark.soak
def test_a_launch_is_measured() -> None:
    """Real launches of both kinds: the parts of each add up, and the ratio is that of the totals."""
    done = subprocess.run(
        [sys.executable, "-m", "allhands", "bench", "launch", "--ranks", "2", "--rounds", "1", "--json"],
        env=harness.environment({}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for values in found["kinds"].values():
        assert values["before_s"] + values["import_s"] + values["after_s"] == pytest.approx(values["total_s"])
        assert min(values["before_s"], values["import_s"], values["end_s"]) > 0
    ours, theirs = (found["kinds"][kind]["total_s"] for kind in ("allhands", "torchrun"))
    assert found["ratio"] == pytest.approx(theirs / ours)
    assert found["kinds"]["imports"]["after_s"] < found["kinds"]["allhands"]["after_s"]
    floor = found["kinds"]["imports"]["import_s"]
    assert found["not_importing_by_difference_s"] == pytest.approx(ours - floor)
