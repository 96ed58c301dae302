"""The diagnosis of a stalled job, from snapshots that are made up."""

from __future__ import annotations

import time
from typing import Any

from psutil import STATUS_SLEEPING as SLEEPING
from psutil import STATUS_STOPPED as STOPPED

from allhands.doctor.stalled_job import RankState, count_progress, diagnose, parse_frames, user_frame
from allhands.observe.flight_recorder import Entry, FlightRecorder

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 10 in forward
  File "/home/me/train.py", line 17 in step
  File "/home/me/train.py", line 30 in <module>
"""


def entry(number: int, state: str, *, age: float = 60.0, operation: str = "all_reduce", **more: Any) -> Entry:
    """Return an entry of the default group."""
    at = time.monotonic() - age
    known = {
        "group": "0",
        "sequence": number,
        "reduction": "SUM",
        "dtype": "float32",
        "shape": (4,),
        "root": -1,
        **more,
    }
    return Entry(
        number=number,
        operation=operation,
        bytes=16,
        site=f"train.py:{number}",
        state=state,
        main=True,
        issued_s=at,
        started_s=at,
        ended_s=at if state == "done" else 0.0,
        **known,
    )


def state_of(rank: int, *entries: Entry, state: str = SLEEPING, busy: float = 0.0, dump: str = "") -> RankState:
    """Return a rank with these entries."""
    recorder = FlightRecorder(1000 + rank, rank, 3, entries)
    return RankState(rank, 1000 + rank, recorder, state, frames=parse_frames(dump), source="x", busy=busy)


def test_main_thread_and_user_frame() -> None:
    """The thread that took the signal is the main one; libraries and packages are not the user's."""
    found = parse_frames(DUMP)
    assert [frame.line for frame in found] == [10, 17, 30]
    mine = user_frame(found)
    assert mine is not None
    assert str(mine) == "train.py:17 in step"
    # Without one that is called current, the oldest comes last.
    assert parse_frames(DUMP.replace("Current thread", "Thread"))[-1].line == 30
    assert parse_frames("nonsense") == ()
    assert user_frame(()) is None


def test_rank_behind() -> None:
    """It is named with its line; the others with the call that they wait in."""
    waits = entry(5, "running")
    everyone = [state_of(0, entry(4, "done"), waits), state_of(1, waits), state_of(2, entry(4, "done"), dump=DUMP)]
    (found,) = diagnose(everyone, 3, 0, host="here")
    assert (found.level, found.slug) == ("red", "rank-behind")
    assert found.details["rank"] == 2
    assert found.details["line"] == "train.py:17 in step"
    assert found.details["misses"] == "all_reduce SUM of float32[4]"
    assert found.details["waiting"] == [0, 1]
    assert "since 60 s" in found.why


def test_short_wait_is_yellow() -> None:
    """A wait below the limit is reported as yellow."""
    waits = entry(5, "running", age=1.0)
    (found,) = diagnose([state_of(0, waits), state_of(1)], 2, 0, host="here")
    assert found.level == "yellow"


def test_progress_is_green() -> None:
    """Calls that began or ended between two looks are enough, whatever anyone waits in."""
    (found,) = diagnose([state_of(0, entry(5, "running")), state_of(1)], 2, 3, host="here")
    assert found.level == "green"
    before = {1: FlightRecorder(1, 0, 2, (entry(1, "running"),))}
    after = {1: FlightRecorder(1, 0, 2, (entry(1, "done"), entry(2, "running")))}
    assert (count_progress(before, after), count_progress(after, after)) == (2, 0)


def test_no_rank_waits() -> None:
    """Ranks that all compute are no stall."""
    (found,) = diagnose([state_of(0, entry(4, "done"), busy=1.0), state_of(1, entry(4, "done"))], 2, 0, host="here")
    assert found.level == "green"


def test_stopped_rank() -> None:
    """A stopped rank is reported with the command that continues it."""
    (found,) = diagnose([state_of(0, entry(5, "running")), state_of(1, state=STOPPED)], 2, 0, host="here")
    assert (found.level, found.slug) == ("red", "peer-silent")
    assert found.commands == ("kill -CONT 1001",)


def test_all_ranks_in_one_call() -> None:
    """All ranks are in one call that does not end: ranks of other machines are missing, or the engine stalls."""
    waits = entry(5, "running")
    (elsewhere,) = diagnose([state_of(0, waits), state_of(1, waits)], 4, 0, host="here")
    assert (elsewhere.slug, elsewhere.details["missing"]) == ("rank-behind", [2, 3])
    assert not elsewhere.certain
    (engine,) = diagnose([state_of(0, waits), state_of(1, waits)], 2, 0, host="here")
    assert engine.slug == "collective-timeout"
    (work,) = diagnose([state_of(0, waits, busy=0.9), state_of(1, waits)], 2, 0, host="here")
    assert work.level == "green"


def test_message_names_its_peer() -> None:
    """The finding names the rank from which a message is awaited."""
    receives = entry(1, "running", operation="recv", root=0, sequence=0, reduction="")
    waits = entry(5, "running")
    (found,) = diagnose([state_of(0, waits), state_of(1, waits), state_of(2, receives)], 3, 0, host="here")
    assert found.details["rank"] == 2
    assert "it is in recv with rank 0 at train.py:1" in found.what
