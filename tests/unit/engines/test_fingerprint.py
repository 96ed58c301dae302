from __future__ import annotations

import pytest
import torch

from allhands.engines.dtypes import DTYPES, OPERATIONS
from allhands.engines.fingerprint import BYTES, HEAD_BYTES, Call, judge, judge_sizes, unpack

OPERATION = {name: code for code, name in enumerate(OPERATIONS)}
FLOAT, INT = DTYPES[torch.float32], DTYPES[torch.int32]
SUM, MAX = 1, 5
USUAL = Call(7, OPERATION["all_reduce"], 4000, SUM, FLOAT, shape="[1000]", site="train.py:41")


def but(**changes: object) -> Call:
    """Return the usual call with something else about it."""
    names = ("sequence", "operation", "nbytes", "reduction", "dtype", "root", "uneven", "shape", "site", "refused")
    return Call(**{**{name: getattr(USUAL, name) for name in names}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        USUAL,
        Call(1, OPERATION["barrier"]),
        Call(2**63, OPERATION["broadcast"], 2**40, dtype=FLOAT, root=3, shape="[2, 3]", site="déjà.py:1"),
        Call(3, OPERATION["all_to_all"], 5, uneven=True),
        Call(3, OPERATION["all_gather"], site="a.py:1", refused="a list of 2 tensors in a group of 3"),
    ],
)
def test_a_record_gives_the_call_back(call: Call) -> None:
    """What is packed is what is unpacked, in a record of bounded size that may have anything behind it."""
    record = call.pack()
    assert len(record) <= BYTES
    assert unpack(record.ljust(2 * BYTES, b"\xff")) == call
    assert unpack(memoryview(record)) == call


def test_long_words_are_cut() -> None:
    """A path of any length fits; its end stays, which is where the file and the line are."""
    call = but(shape="[1, 2]" * 100, site="/very" * 100 + "/train.py:41", refused="é" * 1000)
    record = call.pack()
    assert len(record) <= BYTES
    found = unpack(record)
    assert found.site.endswith("/train.py:41")
    assert found.refused
    assert found.shape.startswith("[1, 2]")


def test_equal_calls_have_equal_heads() -> None:
    """Words are for readers: calls from different lines, of different shapes but one size, are the same call."""
    other = but(shape="[10, 100]", site="other.py:9")
    assert other.pack()[:HEAD_BYTES] == USUAL.pack()[:HEAD_BYTES]
    assert judge([USUAL, other, USUAL], [0, 1, 2]) is None


DIFFERENT = {
    "sequence": but(sequence=8),
    "operation": but(operation=OPERATION["reduce"]),
    "count": but(nbytes=4004),
    "reduction": but(reduction=MAX),
    "type": but(dtype=INT),
    "root": but(root=1),
    "refused": but(refused="no"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_difference_is_seen(what: str) -> None:
    """Each field that must agree has its own bytes in the head, and makes its rank the odd one."""
    odd = DIFFERENT[what]
    assert odd.pack()[:HEAD_BYTES] != USUAL.pack()[:HEAD_BYTES]
    found = judge([USUAL, USUAL, odd, USUAL], [10, 11, 12, 13])
    assert found is not None
    assert found.odd == (2,)
    assert found.lines[0].startswith("ranks 10, 11 and 13 called all_reduce of float32 x 1000 by SUM")
    assert found.lines[1].startswith("rank 12 ")


def test_the_majority_is_taken_for_what_was_meant() -> None:
    """With three kinds of call the largest side is right and all others are odd; in a tie, the lowest rank's side."""
    a, b, c = USUAL, but(reduction=MAX), but(dtype=INT)
    found = judge([b, a, c, a], [0, 1, 2, 3])
    assert found is not None
    assert found.odd == (0, 2)
    tie = judge([b, a, a, b], [0, 1, 2, 3])
    assert tie is not None
    assert tie.odd == (1, 2)


def test_words_say_what_and_where() -> None:
    """A line has operation, type, count, reduction, root, shape and place; ranks that said the same share it."""
    rooted = Call(1, OPERATION["reduce"], 24, MAX, INT, root=2, shape="[2, 3]", site="a.py:5")
    found = judge([USUAL, USUAL, but(site="b.py:2"), rooted], [0, 1, 2, 3])
    assert found is not None
    assert found.lines == (
        "ranks 0 and 1 called all_reduce of float32 x 1000 by SUM, [1000], at train.py:41",
        "rank 2 called all_reduce of float32 x 1000 by SUM, [1000], at b.py:2",
        "rank 3 called reduce of int32 x 6 by MAX with root 2, [2, 3], at a.py:5",
    )


def test_one_refusal_is_a_difference_and_a_common_one_is_not() -> None:
    """Where nobody can make the call, each says so itself; where one cannot, its reason is told."""
    no = but(refused="AVG is not defined on int32")
    assert judge([no, no], [0, 1]) is None
    found = judge([USUAL, no, USUAL], [0, 1, 2])
    assert found is not None
    assert found.odd == (1,)
    assert found.lines[1] == "rank 1 cannot do its all_reduce at train.py:41: AVG is not defined on int32"


def test_sizes_are_left_to_the_tables_where_someone_is_uneven() -> None:
    """One rank with parts of different sizes is enough: then every pair is compared, and not the totals."""
    gather = Call(1, OPERATION["all_gather"], 8, dtype=FLOAT)
    uneven = Call(1, OPERATION["all_gather"], 12, dtype=FLOAT, uneven=True)
    assert judge([gather, uneven], [0, 1]) is None
    assert judge([gather, Call(1, OPERATION["all_gather"], 12, dtype=FLOAT)], [0, 1]) is not None
    assert judge([gather, Call(1, OPERATION["gather"], 12, dtype=FLOAT, uneven=True)], [0, 1]) is not None


def test_tables_that_fit() -> None:
    """What everyone gives is what the other end expects, for any table."""
    gives = [[(3 * i + 5 * j) % 7 for j in range(4)] for i in range(4)]
    takes = [[gives[i][j] for i in range(4)] for j in range(4)]
    assert judge_sizes(gives, takes, [USUAL] * 4, [0, 1, 2, 3]) is None


def test_a_rank_whose_sizes_fit_nobody_is_blamed() -> None:
    """Rank 2 expects too much of everyone: it is in every pair that does not fit, and each pair is told."""
    gives = [[4] * 3] * 3
    takes = [[4] * 3, [4] * 3, [8] * 3]
    found = judge_sizes(gives, takes, [USUAL] * 3, [5, 6, 7])
    assert found is not None
    assert found.odd == (2,)
    assert "rank 5 gives rank 7 4 bytes, which expects 8" in found.lines


def test_a_single_pair_that_does_not_fit_names_both() -> None:
    """Nobody can tell which of the two is wrong."""
    gives = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    takes = [[1, 1, 1], [9, 2, 2], [3, 3, 3]]
    found = judge_sizes(gives, takes, [USUAL] * 3, [0, 1, 2])
    assert found is not None
    assert found.odd == (0, 1)
