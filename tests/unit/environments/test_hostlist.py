from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.environments.slurm import MOST, counts, expand, split
from allhands.errors import AllhandsError

Bracket = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("node[01-04,07],gpu-a", ["node01", "node02", "node03", "node04", "node07", "gpu-a"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("n[1-2]-ib,x[3-4]", ["n1-ib", "n2-ib", "x3", "x4"]),
        ("host[5],b[1-2]", ["host5", "b1", "b2"]),
        ("prefix[0-2,12]", ["prefix0", "prefix1", "prefix2", "prefix12"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a b\tc\nd,e, f", ["a", "b", "c", "d", "e", "f"]),
        ("a,a", ["a", "a"]),
        ("[1-2]", ["1", "2"]),
        ("", []),
    ],
)
def test_examples(written: str, hosts: list[str]) -> None:
    """Lists as Slurm writes them, several brackets and suffixes included."""
    assert expand(written) == hosts


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("n[1-", "not closed"),
        ("n[3-1]", "backwards"),
        ("n[a-b]", "'a-b'"),
        ("n[]", "''"),
        ("n[1,]", "''"),
        ("n[1-2-3]", "'1-2-3'"),
        ("n]1[", "not open"),
        ("n[[1]]", "opened twice"),
        ("n[-1]", "'-1'"),
        ("n[¹]", "'¹'"),
    ],
)
def test_malformed(written: str, why: str) -> None:
    """What is not a host list is shown, with what is wrong about it."""
    with pytest.raises(AllhandsError) as caught:
        expand(written)
    assert caught.value.slug == "invalid-argument"
    assert written in caught.value.diagnosis.what
    assert why in caught.value.diagnosis.why


@pytest.mark.parametrize("written", ["n[0-99999999999]", "a[0-999]b[0-999]", "n[0-65535],m", "n[0-40000,0-40000]"])
def test_too_many(written: str) -> None:
    """A list that would fill the memory is refused before it does."""
    with pytest.raises(AllhandsError, match=str(MOST)):
        expand(written)
    assert len(expand("n[0-65535]")) == MOST


names = st.text("abcz09.-_", max_size=4)
brackets = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(0, 4)).map(lambda t: (t[0], t[0] + t[1], t[2])),
    min_size=1,
    max_size=3,
)
# A host expression: text and brackets in turn, beginning with text so that it is never empty.
items = st.tuples(st.sampled_from(["n", "gpu-", "0"]), st.lists(st.tuples(brackets, names), max_size=3))


def write(item: tuple[str, list[tuple[Bracket, str]]]) -> str:
    """Write a host expression as Slurm does."""
    first, rest = item
    text = first
    for bracket, name in rest:
        parts = [f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high}" for low, high, width in bracket]
        text += f"[{','.join(parts)}]{name}"
    return text


def reference(item: tuple[str, list[tuple[Bracket, str]]]) -> list[str]:
    """Expand a host expression from its parts, by recursion from the right."""
    first, rest = item
    if not rest:
        return [first]
    (bracket, name), *others = rest
    tails = reference((name, others))
    numbers = [f"{number:0{width}d}" for low, high, width in bracket for number in range(low, high + 1)]
    return [f"{first}{number}{tail}" for number, tail in itertools.product(numbers, tails)]


@given(st.lists(items, max_size=3), st.sampled_from([",", " ", ", ", "\n"]))
def test_round_trip(listed: list[tuple[str, list[tuple[Bracket, str]]]], separator: str) -> None:
    """Any list expands to what its parts say, in order, whatever separates its items."""
    written = [write(item) for item in listed]
    expected = [reference(item) for item in listed]
    if sum(map(len, expected)) > MOST:
        return
    assert split(separator.join(written)) == written
    assert expand(separator.join(written)) == [host for hosts in expected for host in hosts]


@given(st.text("n[]-,0123 x", max_size=12))
def test_any_text(written: str) -> None:
    """Any text gives hosts without brackets, or the one error; never anything else."""
    try:
        hosts = expand(written)
    except AllhandsError as error:
        assert error.slug == "invalid-argument"  # noqa: PT017  # hypothesis gives both kinds of text
    else:
        assert not any(letter in host for host in hosts for letter in "[], ")


@pytest.mark.parametrize(
    ("written", "numbers"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2]), ("3(x2), 1(x2)", [3, 3, 1, 1])]
)
def test_counts(written: str, numbers: list[int]) -> None:
    """Tasks per node, as Slurm shortens them."""
    assert counts(written) == numbers


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_round_trip(runs: list[tuple[int, int]]) -> None:
    """Any run lengths expand to themselves."""
    written = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)
    assert counts(written) == [number for number, times in runs for _ in range(times)]


@pytest.mark.parametrize("written", ["2(x", "x", "2(3)", "", "2,,1", "1(x99999999999)"])
def test_malformed_counts(written: str) -> None:
    """What is not a list of counts is an error, also where it would fill the memory."""
    with pytest.raises(AllhandsError) as caught:
        counts(written)
    assert caught.value.slug == "invalid-argument"
