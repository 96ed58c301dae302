from __future__ import annotations

import msgspec
import pytest

from allhands.diagnosis import MOST_NAMED, Diagnosis, by_host, count, duration, join, ranks

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
    """An empty part has no line."""
    assert Diagnosis("peer-lost", "rank 3 is gone").render("PeerLost") == "PeerLost: rank 3 is gone   [peer-lost]"


def test_render_ends_with_the_traceback() -> None:
    """The other rank's traceback is last, with a mark on each line to distinguish it from the own one."""
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


@pytest.mark.parametrize(
    ("parts", "written"),
    [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")],
)
def test_join_reads_as_a_sentence(parts: list[str], written: str) -> None:
    """Words are joined by commas, the last by "and"."""
    assert join(parts) == written


def test_join_takes_another_last_word() -> None:
    """The word before the last part can be another one."""
    assert join(["a", "b", "c"], "or") == "a, b or c"


@pytest.mark.parametrize(("number", "written"), [(0, "0 ranks"), (1, "1 rank"), (3, "3 ranks")])
def test_count_agrees_with_its_noun(number: int, written: str) -> None:
    """Only one of a thing is written in the singular."""
    assert count(number, "rank") == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "0 s"),
        (0.42, "0.4 s"),
        (2.0, "2 s"),
        (9.5, "9.5 s"),
        (12.3, "12 s"),
        (60, "60 s"),
        (119, "119 s"),
        (120, "2 min"),
        (1800, "30 min"),
    ],
)
def test_duration_has_the_precision_people_care_about(seconds: float, written: str) -> None:
    """Tenths below ten seconds, whole seconds below two minutes, then minutes."""
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        ([3], "rank 3"),
        ([7, 5], "ranks 5 and 7"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([7, 2, 0, 1, 5], "ranks 0-2, 5 and 7"),
        ([0, 1, 2, 4, 5, 6], "ranks 0-2 and 4-6"),
        ([4, 4, 4], "rank 4"),
    ],
)
def test_ranks_are_sorted_into_runs(numbers: list[int], written: str) -> None:
    """Ranks are written in order, once each; three or more in a row become a run, two stay two."""
    assert ranks(numbers) == written


def test_ranks_beyond_the_most_are_counted() -> None:
    """Sixteen ranks are named; those after are counted."""
    assert MOST_NAMED == 16
    assert ranks(range(16)) == "ranks 0-15"
    assert ranks(range(17)) == "ranks 0-15 and 1 more"
    assert ranks(range(0, 2000, 2)) == f"ranks {', '.join(str(n) for n in range(0, 32, 2))} and 984 more"


def test_ranks_take_any_iterable() -> None:
    """Keys of a mapping and generators are as good as lists."""
    assert ranks({3: "a", 1: "b"}) == "ranks 1 and 3"
    assert ranks(n for n in (2, 1)) == "ranks 1 and 2"


def test_by_host_groups_in_order_of_the_lowest_rank() -> None:
    """Ranks are grouped by host; the host with the lowest rank is first."""
    assert by_host({6: "node-b", 3: "node-a", 7: "node-b"}) == "rank 3 (node-a) and ranks 6 and 7 (node-b)"
    assert by_host({1: "node-b", 0: "node-a", 2: "node-a"}) == "ranks 0 and 2 (node-a) and rank 1 (node-b)"


def test_by_host_leaves_out_unknown_hosts() -> None:
    """A rank whose host is not known is named without one."""
    assert by_host({3: "", 4: "node-a"}) == "rank 3 and rank 4 (node-a)"


def test_by_host_names_at_most_sixteen_in_all() -> None:
    """The limit holds over all hosts together, not for each."""
    hosts = {rank: f"node-{rank // 8}" for rank in range(64)}
    assert by_host(hosts) == "ranks 0-7 (node-0), ranks 8-15 (node-1) and 48 more"


def test_by_host_of_nobody_is_empty() -> None:
    """No ranks give an empty text."""
    assert by_host({}) == ""
