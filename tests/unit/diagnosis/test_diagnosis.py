from __future__ import annotations

import msgspec

from allhands.diagnosis import Diagnosis

FULL = Diagnosis(
    "missing-ranks",
    "6 of 8 ranks answered within 60 s",
    who="ranks 0-5 waited for ranks 6 and 7",
    why="nothing was ever heard from node-b\nthe others came from 10.0.0.1",
    fix="look at ranks 6 and 7; or raise timeout=",
    ranks=(6, 7),
    hosts=("node-b",),
)


def test_render_has_the_look_of_every_error() -> None:
    """What and slug on the first line, then who, why and fix, each further line aligned with the first."""
    assert FULL.render("RollCallTimeout").splitlines() == [
        "RollCallTimeout: 6 of 8 ranks answered within 60 s   [missing-ranks]",
        "  who:  ranks 0-5 waited for ranks 6 and 7",
        "  why:  nothing was ever heard from node-b",
        "        the others came from 10.0.0.1",
        "  fix:  look at ranks 6 and 7; or raise timeout=",
    ]


def test_render_leaves_out_what_is_empty() -> None:
    """A part that has nothing to say takes no line."""
    assert Diagnosis("peer-lost", "rank 3 is gone").render("PeerLost") == "PeerLost: rank 3 is gone   [peer-lost]"


def test_render_ends_with_the_traceback() -> None:
    """The other rank's traceback comes last, marked line by line so that it is not taken for one's own."""
    found = Diagnosis("peer-failed", "rank 3 raised", traceback='File "a.py", line 1\n  x\n\nKeyError: 1\n')
    assert found.render("PeerFailed").splitlines()[1:] == [
        "  its traceback:",
        '    | File "a.py", line 1',
        "    |   x",
        "    | ",
        "    | KeyError: 1",
    ]


def test_diagnosis_survives_the_wire() -> None:
    """Every rank is given the same diagnosis, whatever parts it has."""
    for found in (FULL, Diagnosis("peer-lost", "x"), Diagnosis("no-route", "x", certain=False, traceback="t")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Diagnosis) == found
