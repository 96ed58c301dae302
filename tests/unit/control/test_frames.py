from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.control.messages import HEADER, MOST_BYTES, FrameError, Splitter, pack


def chunks(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Cut ``stream`` at the given places."""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:stop] for start, stop in pairwise(places)]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_chunking_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    """However the network cuts the stream, the frames come out whole, in order, and nothing is held back."""
    splitter = Splitter()
    found = [frame for chunk in chunks(b"".join(map(pack, bodies)), cuts) for frame in splitter.feed(chunk)]
    assert found == bodies
    assert splitter.held == b""


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.integers(1, 53))
def test_an_unfinished_frame_is_held(bodies: list[bytes], missing: int) -> None:
    """What came of an unfinished frame is kept as it came, and the rest completes it."""
    stream = b"".join(map(pack, bodies))
    last = pack(bodies[-1])
    missing = min(missing, len(last))
    splitter = Splitter()
    assert splitter.feed(stream[: len(stream) - missing]) == bodies[:-1]
    assert splitter.held == last[: len(last) - missing]
    assert splitter.feed(stream[len(stream) - missing :]) == bodies[-1:]


@given(st.binary(max_size=200), st.lists(st.integers(0, 500), max_size=10))
def test_any_bytes_are_frames_or_an_error(stream: bytes, cuts: list[int]) -> None:
    """Whatever comes, a splitter never holds more than one frame of the size it allows."""
    splitter = Splitter(most=20)
    try:
        for chunk in chunks(stream, cuts):
            assert all(len(frame) <= 20 for frame in splitter.feed(chunk))
            assert len(splitter.held) < HEADER.size + 20
    except FrameError:
        return


@pytest.mark.parametrize("most", [0, 20, MOST_BYTES])
def test_a_length_over_the_limit_is_an_error_before_any_of_it_came(most: int) -> None:
    """The header alone is refused; nothing of the frame is waited for or made room for."""
    assert Splitter(most).feed(HEADER.pack(most)) == ([b""] if most == 0 else [])
    splitter = Splitter(most)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=f"{most + 1} bytes"):
            splitter.feed(HEADER.pack(most + 1))
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_frames_before_the_bad_one_do_not_hide_it() -> None:
    """A stream that turns bad is an error even when good frames came in the same read."""
    with pytest.raises(FrameError):
        Splitter(20).feed(pack(b"good") + HEADER.pack(21))


def test_a_limit_can_be_raised_in_the_middle() -> None:
    """A connection that proved itself may send more from then on."""
    splitter = Splitter(4)
    assert splitter.feed(pack(b"1234")) == [b"1234"]
    splitter.most = 5
    assert splitter.feed(pack(b"12345")) == [b"12345"]


def test_a_message_over_the_limit_is_not_sent() -> None:
    """What the other end would refuse is refused here."""
    with pytest.raises(FrameError, match="over the limit"):
        pack(bytes(MOST_BYTES + 1))
