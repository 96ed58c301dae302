from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.control import messages
from allhands.control.messages import (
    HEADER,
    MOST_BYTES,
    Acknowledged,
    Challenge,
    Claim,
    Closing,
    Complete,
    Ended,
    EndGroup,
    Failed,
    FrameError,
    Hello,
    Leave,
    LeaveGranted,
    LogLine,
    Ping,
    Pong,
    Proof,
    Refused,
    Splitter,
    Status,
    StatusQuery,
    StatusReport,
    StatusRequest,
    StoreReply,
    StoreRequest,
    Waiting,
    decode_challenge,
    decode_from_coordinator,
    decode_from_member,
    decode_hello,
    decode_proof,
    encode,
    pack,
)
from allhands.control.process_identity import Identity
from allhands.diagnosis import Diagnosis

DIAGNOSIS = Diagnosis("peer-failed", "rank 1 raised", "rank 1", "it said so", "mend it", (1,), ("a",), False, "tb\n")
STATUS = Status(3, "busy", "in all_reduce at train.py:3", 1.5, "node-a", 812)
CLAIM = Claim(Identity("a", "k", 1, 2.0, "p"), "gloo", "", "", "2.13", "0.1", "env", 3.0, 1, 2, True, DIAGNOSIS)

FROM_MEMBER = [
    CLAIM,
    StoreRequest(1, "compare_set", ["k"], [b"", b"\xff"], -5, 2.5),
    Failed(2, "ValueError", "no", "Traceback …", follows=True),
    EndGroup(3, DIAGNOSIS),
    Leave(4, "exit", 5.0),
    StatusRequest(5, 1.0),
    STATUS,
    Pong(),
]
FROM_COORDINATOR = [
    Waiting("1 of 2 ranks are here"),
    Complete(one_host=True, session="abc"),
    Refused(DIAGNOSIS),
    Ended(DIAGNOSIS),
    StoreReply(1, [b"", b"\x00\xff"], 7, "empty"),
    Acknowledged(2),
    LeaveGranted(3, [STATUS]),
    StatusReport(4, [STATUS, STATUS]),
    StatusQuery(),
    Ping(),
    LogLine("odd"),
    Closing(),
]
HANDSHAKE: list[tuple[Any, Any]] = [
    (decode_hello, Hello(1, "night", 2, 3, 4, bytes(32), has_token=True)),
    (decode_challenge, Challenge(1, bytes(32), b"\xff" * 32, has_token=False)),
    (decode_challenge, Refused(DIAGNOSIS)),
    (decode_challenge, Closing()),
    (decode_proof, Proof(b"\xff" * 32)),
]
DECODERS = [decode_hello, decode_challenge, decode_proof, decode_from_member, decode_from_coordinator]


def name(value: object) -> str:
    """Name a test case after its message."""
    return type(value).__name__


@pytest.mark.parametrize("message", FROM_MEMBER, ids=name)
def test_messages_of_a_member_round_trip(message: Any) -> None:
    """Every message of a member is decoded to an equal one of the same type."""
    found = decode_from_member(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize("message", FROM_COORDINATOR, ids=name)
def test_messages_of_the_coordinator_round_trip(message: Any) -> None:
    """Every message of the coordinator is decoded to an equal one of the same type."""
    found = decode_from_coordinator(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize(("decode", "message"), HANDSHAKE, ids=name)
def test_messages_of_the_handshake_round_trip(decode: Any, message: Any) -> None:
    """Every message of the handshake is decoded to an equal one."""
    assert decode(encode(message)) == message


def test_no_message_is_untested() -> None:
    """The lists above contain every message class."""
    structs = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == messages.__name__
    }
    assert structs == {type(message) for message in [*FROM_MEMBER, *FROM_COORDINATOR, *(pair[1] for pair in HANDSHAKE)]}


@pytest.mark.parametrize("message", [*FROM_COORDINATOR, Hello(1, "", 0, 0, 1, b"", has_token=False)], ids=name)
def test_a_member_cannot_send_messages_of_the_coordinator(message: Any) -> None:
    """A message of the other direction is malformed."""
    with pytest.raises(msgspec.ValidationError):
        decode_from_member(encode(message))


@pytest.mark.parametrize("message", [message for message in FROM_MEMBER if message is not STATUS], ids=name)
def test_the_coordinator_cannot_send_messages_of_a_member(message: Any) -> None:
    """A message of the other direction is malformed."""
    with pytest.raises(msgspec.ValidationError):
        decode_from_coordinator(encode(message))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Execute", "id": 1},
        {"id": 1, "op": "get"},
        {"type": "StoreRequest", "id": 1},
        {"type": "StoreRequest", "id": 1, "op": "eval"},
        {"type": "StoreRequest", "id": "1", "op": "get"},
        {"type": "StoreRequest", "id": 1, "op": "get", "keys": "k"},
        {"type": "StoreRequest", "id": 1, "op": "get", "keys": [b"k"]},
        {"type": "StoreRequest", "id": 1, "op": "set", "values": ["v"]},
        {"type": "StoreRequest", "id": 1, "op": "get", "wait_s": None},
        {"type": "Leave", "id": 1, "how": "angrily", "wait_s": 0.0},
        {"type": "Failed", "id": 1, "kind": "K", "message": "m", "traceback": "t", "follows": 1},
        ["StoreRequest", 1],
        1,
        None,
        "StoreRequest",
    ],
)
def test_wrong_types_are_rejected(wrong: Any) -> None:
    """An unknown tag, a missing field or a field of another type is malformed."""
    with pytest.raises(msgspec.MsgspecError):
        decode_from_member(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa5\xff\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 8000,
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=["empty", "no-msgpack", "no-utf-8", "deep", "endless"],
)
def test_malformed_frames_are_one_kind_of_error(decode: Any, frame: bytes) -> None:
    """Every malformed frame, text that is not UTF-8 and endless nesting included, is a MsgspecError."""
    with pytest.raises(msgspec.MsgspecError):
        decode(frame)


@given(st.sampled_from(DECODERS), st.sampled_from([*FROM_MEMBER, *FROM_COORDINATOR]), st.data())
def test_damaged_frames_are_a_message_or_one_kind_of_error(decode: Any, message: Any, data: st.DataObject) -> None:
    """A frame with some bytes changed is still a typed message or a MsgspecError, nothing else."""
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(frame))
    except msgspec.MsgspecError:
        return
    assert isinstance(found, msgspec.Struct)


def chunks(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Cut ``stream`` at the given places."""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:stop] for start, stop in pairwise(places)]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_chunking_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    """The frames are complete and in order for every division of the stream into chunks."""
    splitter = Splitter()
    found = [frame for chunk in chunks(b"".join(map(pack, bodies)), cuts) for frame in splitter.feed(chunk)]
    assert found == bodies
    assert splitter.held == b""


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.integers(1, 53))
def test_an_unfinished_frame_is_held(bodies: list[bytes], missing: int) -> None:
    """The bytes of an incomplete frame are kept, and the rest completes it."""
    stream = b"".join(map(pack, bodies))
    last = pack(bodies[-1])
    missing = min(missing, len(last))
    splitter = Splitter()
    assert splitter.feed(stream[: len(stream) - missing]) == bodies[:-1]
    assert splitter.held == last[: len(last) - missing]
    assert splitter.feed(stream[len(stream) - missing :]) == bodies[-1:]


@given(st.binary(max_size=200), st.lists(st.integers(0, 500), max_size=10))
def test_any_bytes_are_frames_or_an_error(stream: bytes, cuts: list[int]) -> None:
    """For any input, a splitter never holds more than one frame of the size that it allows."""
    splitter = Splitter(most=20)
    try:
        for chunk in chunks(stream, cuts):
            assert all(len(frame) <= 20 for frame in splitter.feed(chunk))
            assert len(splitter.held) < HEADER.size + 20
    except FrameError:
        return


@pytest.mark.parametrize("most", [0, 20, MOST_BYTES])
def test_a_length_over_the_limit_is_an_error_before_the_body(most: int) -> None:
    """The header alone is refused; no memory is allocated for the body."""
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
    """A malformed header is an error even after complete frames in the same read."""
    with pytest.raises(FrameError):
        Splitter(20).feed(pack(b"good") + HEADER.pack(21))


def test_a_limit_can_be_raised_in_the_middle() -> None:
    """After the proof a connection may send larger frames."""
    splitter = Splitter(4)
    assert splitter.feed(pack(b"1234")) == [b"1234"]
    splitter.most = 5
    assert splitter.feed(pack(b"12345")) == [b"12345"]


def test_a_message_over_the_limit_is_not_sent() -> None:
    """A message that the other end would refuse is not packed."""
    with pytest.raises(FrameError, match="over the limit"):
        pack(bytes(MOST_BYTES + 1))
