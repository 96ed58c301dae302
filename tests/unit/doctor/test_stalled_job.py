"""Who waits for whom: the judgement, from boards and looks that are made up."""

from __future__ import annotations

import time
from typing import Any

from allhands.doctor.proc_status import Look, look
from allhands.doctor.stack_trace import Trace, frames, users
from allhands.doctor.stalled_job import Standing, judge, moved
from allhands.observe.flight_recorder import Entry, FlightRecorder

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 10 in forward
  File "/home/me/train.py", line 17 in step
  File "/home/me/train.py", line 30 in <module>
"""


def note(number: int, state: str, *, age: float = 60.0, operation: str = "all_reduce", **more: Any) -> Entry:
    """Return a note of the default group."""
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


def standing(rank: int, *entries: Entry, state: str = "S", busy: float = 0.0, dump: str = "") -> Standing:
    """Return a rank with these entries."""
    seen = Look(1000 + rank, "python", state, 1, 0, 0, 0, "")
    return Standing(
        rank, 1000 + rank, FlightRecorder(1000 + rank, rank, 3, entries), seen, Trace(frames(dump), "x"), busy
    )


def test_the_main_thread_and_the_users_frame() -> None:
    """The thread that took the signal is the main one; libraries and packages are not the user's."""
    found = frames(DUMP)
    assert [frame.line for frame in found] == [10, 17, 30]
    mine = users(found)
    assert mine is not None
    assert mine.site == "train.py:17"
    # Without one that is called current, the oldest comes last.
    assert frames(DUMP.replace("Current thread", "Thread"))[-1].line == 30
    assert frames("nonsense") == ()
    assert users(()) is None


def test_a_rank_that_is_behind() -> None:
    """It is named with its line; the others with the call that they wait in."""
    waits = note(5, "running")
    everyone = [standing(0, note(4, "done"), waits), standing(1, waits), standing(2, note(4, "done"), dump=DUMP)]
    (found,) = judge(everyone, 3, 0, host="here")
    assert (found.level, found.slug) == ("red", "rank-behind")
    assert found.details["rank"] == 2
    assert found.details["line"] == "train.py:17 in step"
    assert found.details["misses"] == "all_reduce SUM of float32[4]"
    assert found.details["waiting"] == [0, 1]
    assert "since 60 s" in found.why


def test_a_short_wait_is_only_yellow() -> None:
    """Someone who looks early is told, but not alarmed."""
    waits = note(5, "running", age=1.0)
    (found,) = judge([standing(0, waits), standing(1)], 2, 0, host="here")
    assert found.level == "yellow"


def test_a_job_that_moves_is_green() -> None:
    """Calls that began or ended between two looks are enough, whatever anyone waits in."""
    (found,) = judge([standing(0, note(5, "running")), standing(1)], 2, 3, host="here")
    assert found.level == "green"
    before = {1: FlightRecorder(1, 0, 2, (note(1, "running"),)), 2: None}
    after = {1: FlightRecorder(1, 0, 2, (note(1, "done"), note(2, "running"))), 2: None}
    assert (moved(before, after), moved(after, after)) == (2, 0)  # type: ignore[arg-type]  # a dict of boards or None


def test_nobody_waits() -> None:
    """Ranks that all compute are no stall."""
    (found,) = judge([standing(0, note(4, "done"), busy=1.0), standing(1, note(4, "done"))], 2, 0, host="here")
    assert found.level == "green"


def test_a_stopped_rank() -> None:
    """The kernel says so, and what lets it go on is shown."""
    (found,) = judge([standing(0, note(5, "running")), standing(1, state="T")], 2, 0, host="here")
    assert (found.level, found.slug) == ("red", "peer-silent")
    assert found.commands == ("kill -CONT 1001",)


def test_all_are_there() -> None:
    """All in one call that does not end: the other machines are to be asked, or it is the engine's fault."""
    waits = note(5, "running")
    (elsewhere,) = judge([standing(0, waits), standing(1, waits)], 4, 0, host="here")
    assert (elsewhere.slug, elsewhere.details["missing"]) == ("rank-behind", [2, 3])
    assert not elsewhere.certain
    (engine,) = judge([standing(0, waits), standing(1, waits)], 2, 0, host="here")
    assert engine.slug == "collective-timeout"
    (work,) = judge([standing(0, waits, busy=0.9), standing(1, waits)], 2, 0, host="here")
    assert work.level == "green"


def test_a_message_names_its_peer() -> None:
    """Who waits for a message is told from whom."""
    receives = note(1, "running", operation="recv", root=0, sequence=0, reduction="")
    waits = note(5, "running")
    (found,) = judge([standing(0, waits), standing(1, waits), standing(2, receives)], 3, 0, host="here")
    assert found.details["rank"] == 2
    assert "it is in recv with rank 0 at train.py:1" in found.what


def test_this_process_as_the_kernel_shows_it() -> None:
    """The real one: its name, age and environment."""
    import os

    seen = look(os.getpid())
    assert seen is not None
    assert seen.environ.get("PATH") == os.environ.get("PATH") or seen.environ
    assert seen.age_s > 0
    assert seen.inner_pid == os.getpid()
    assert not seen.zombie
    assert look(2**22 + 1) is None
