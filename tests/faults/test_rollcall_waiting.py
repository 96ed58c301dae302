"""Ranks that wait in the roll call: for a missing, late or killed rank, and until they are interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from faults.rollcalls import GRACE_S, PATIENT_S, PLACES, TIMEOUT_S, alone, connected, place
from ranks.harness import Job, free_port, launch, running

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("kind", PLACES)
def test_rank_0_does_not_start(kind: str, tmp_path: Path) -> None:
    """If rank 0 is missing, the others raise at the deadline: refused at an address, missing elsewhere."""
    found = alone({"rank": 1, "world_size": 2, "timeout": 1.5, **place(kind, tmp_path)})
    expected = ("connection-refused", "ConnectError") if kind == "tcp" else ("missing-ranks", "RollCallTimeout")
    assert (found["slug"], found["kind"], found["ranks"]) == (*expected, [0])
    assert 1.0 < found["seconds"] < 1.5 + GRACE_S


@pytest.mark.parametrize("kind", ["tcp", *(pytest.param(kind, marks=pytest.mark.soak) for kind in PLACES[1:])])
def test_a_late_rank_0_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Ranks that come two seconds before rank 0 form the group with it."""
    results = launch(
        f"""
import allhands as dist, threading
if rank == 0:
    gate("late")
else:
    threading.Timer(1.5, gate, ["late"]).start()
say(formed=attempt(dist.init_process_group, "gloo", rank=rank, world_size=size, timeout=20, **{place(kind, tmp_path)}))
dist.destroy_process_group()
""",
        2,
    )
    assert [result["formed"]["kind"] for result in results] == ["", ""]
    assert results[1]["formed"]["seconds"] > 1.3
    assert "waiting for" in results[1].stderr


# Print the waiting line at every tick, not each 10 s.
WAITING = """
import allhands as dist, os
from allhands.control import waiting_line
waiting_line._QUIET_S = waiting_line._LOG_EVERY_S = 0.0
say(ready=True)
say(failed=attempt(dist.init_process_group, "gloo", os.environ["WHERE"] or None, rank=rank, world_size=3,
    timeout=float(os.environ["WITHIN"])))
"""


def heard(job: Job, words: str) -> None:
    """Wait until rank 0 prints ``words`` while it waits."""
    deadline = time.monotonic() + PATIENT_S
    while words not in (said := job.ranks[0].stderr.read_text()):
        assert time.monotonic() < deadline, f"rank 0 never said {words!r}:\n{said}"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_roll_call_is_named(victim: int) -> None:
    """Rank 0's death in the roll call is reported at once; another rank's at the deadline, as arrived and left."""
    port, within = free_port(), PATIENT_S if victim == 0 else TIMEOUT_S
    with running(WAITING, 2, {"WHERE": f"tcp://127.0.0.1:{port}", "WITHIN": str(within)}) as job:
        job.wait_for("ready")
        connected(job.ranks[1].pid, port)
        heard(job, "2 of 3 ranks are here")
        killed = job.signal(victim, signal.SIGKILL)
        result = job.results()[1 - victim]
    found = result["failed"]
    if victim == 0:
        assert (found["slug"], found["ranks"]) == ("peer-lost", [0])
        assert found["over"] - killed < 1.0
    else:
        assert (found["slug"], found["ranks"]) == ("missing-ranks", [1, 2])
        assert "connected and disconnected" in found["text"]
        assert found["seconds"] < TIMEOUT_S + GRACE_S


def test_ctrl_c_in_the_roll_call_ends_promptly() -> None:
    """SIGINT to all processes while they wait for a missing rank raises KeyboardInterrupt and leaves nothing."""
    with running(WAITING, 2, {"WHERE": "", "WITHIN": str(PATIENT_S)}) as job:
        heard(job, "2 of 3 ranks are here")
        sent = time.monotonic()
        # To both at once: a rank that learns of the other's end before its own signal would raise that.
        for each in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for entry in job.ranks:
                os.killpg(entry.pid, each)
        results = job.results()
    assert time.monotonic() - sent < 2.0
    for result in results:
        assert result.returncode in {-signal.SIGINT, 1}
        assert "KeyboardInterrupt" in result.stderr
        assert not any("failed" in line for line in result.lines)
