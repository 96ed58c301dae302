from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.control import messages
from allhands.control.messages import (
    Acknowledged,
    Challenge,
    Claim,
    Closing,
    Complete,
    Ended,
    EndGroup,
    Failed,
    Hello,
    Leave,
    LeaveGranted,
    LogLine,
    Ping,
    Pong,
    Proof,
    Refused,
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
def test_what_a_member_says_arrives_as_it_was(message: Any) -> None:
    """Every message of a member comes out of the wire equal and of its own type."""
    found = decode_from_member(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize("message", FROM_COORDINATOR, ids=name)
def test_what_the_coordinator_says_arrives_as_it_was(message: Any) -> None:
    """Every message of the coordinator comes out of the wire equal and of its own type."""
    found = decode_from_coordinator(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize(("decode", "message"), HANDSHAKE, ids=name)
def test_the_handshake_arrives_as_it_was(decode: Any, message: Any) -> None:
    """Every message of the handshake comes out of the wire equal."""
    assert decode(encode(message)) == message


def test_no_message_is_untested() -> None:
    """The lists above hold every message there is."""
    structs = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == messages.__name__
    }
    assert structs == {type(message) for message in [*FROM_MEMBER, *FROM_COORDINATOR, *(pair[1] for pair in HANDSHAKE)]}


@pytest.mark.parametrize("message", [*FROM_COORDINATOR, Hello(1, "", 0, 0, 1, b"", has_token=False)], ids=name)
def test_a_member_cannot_speak_as_the_coordinator(message: Any) -> None:
    """A message of the other direction is malformed."""
    with pytest.raises(msgspec.ValidationError):
        decode_from_member(encode(message))


@pytest.mark.parametrize("message", [message for message in FROM_MEMBER if message is not STATUS], ids=name)
def test_the_coordinator_cannot_speak_as_a_member(message: Any) -> None:
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
    """An unknown tag, a missing field or a field of another type is malformed, never taken on trust."""
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
    """Whatever is wrong with a frame, text that is not UTF-8 and endless nesting included, is a MsgspecError."""
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
