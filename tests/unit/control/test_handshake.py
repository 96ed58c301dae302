from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allhands.control import handshake
from allhands.control.messages import Challenge, Hello

TOKEN, OTHER = b"open sesame", b"open barley"


def hello(token: bytes = TOKEN) -> Hello:
    """Return an opening of rank 1 of 4."""
    return handshake.hello(job="night", attempt=2, rank=1, world_size=4, token=token)


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_two_ends_with_one_token_accept_each_other(token: bytes) -> None:
    """With the same token (or none on both sides) both proofs hold."""
    opening = hello(token)
    answer = handshake.challenge(opening, token)
    assert opening.has_token == answer.has_token == bool(token)
    assert handshake.verify_coordinator(opening, answer, token)
    assert handshake.verify_member(opening, answer, handshake.member_proof(opening, answer, token), token)


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, OTHER), (TOKEN, b""), (b"", TOKEN), (TOKEN, TOKEN + b"\0x")])
def test_two_ends_with_different_tokens_do_not(ours: bytes, theirs: bytes) -> None:
    """Neither end accepts the proof of the other when the tokens differ or only one side has one."""
    opening = hello(ours)
    answer = handshake.challenge(opening, theirs)
    assert not handshake.verify_coordinator(opening, answer, ours)
    assert not handshake.verify_member(opening, answer, handshake.member_proof(opening, answer, ours), theirs)


def test_a_proof_cannot_be_reflected() -> None:
    """The proof of one side is not accepted as the proof of the other side."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    assert not handshake.verify_member(opening, answer, answer.proof, TOKEN)
    mirrored = msgspec.structs.replace(answer, proof=handshake.member_proof(opening, answer, TOKEN))
    assert not handshake.verify_coordinator(opening, mirrored, TOKEN)


@pytest.mark.parametrize(
    "change",
    [
        {"job": "day"},
        {"attempt": 3},
        {"rank": 0},
        {"world_size": 5},
        {"nonce": bytes(32)},
        {"protocol": 99},
        {"has_token": False},
    ],
)
def test_every_field_of_the_opening_is_bound(change: dict[str, Any]) -> None:
    """A proof made for one opening does not hold for another that differs in any field."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    proof = handshake.member_proof(opening, answer, TOKEN)
    changed = msgspec.structs.replace(opening, **change)
    assert changed != opening
    assert not handshake.verify_coordinator(changed, answer, TOKEN)
    assert not handshake.verify_member(changed, answer, proof, TOKEN)


def test_the_coordinators_nonce_is_bound() -> None:
    """A proof does not hold for another challenge."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    changed = msgspec.structs.replace(answer, nonce=bytes(32))
    assert not handshake.verify_coordinator(opening, changed, TOKEN)
    assert not handshake.verify_member(opening, changed, handshake.member_proof(opening, answer, TOKEN), TOKEN)


def test_a_recorded_exchange_proves_nothing_later() -> None:
    """Each side's nonce is fresh, so a recorded proof of either side is not accepted again."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    proof = handshake.member_proof(opening, answer, TOKEN)
    again = handshake.challenge(opening, TOKEN)
    assert again.nonce != answer.nonce
    assert not handshake.verify_member(opening, again, proof, TOKEN)
    fresh = hello()
    assert fresh.nonce != opening.nonce
    assert not handshake.verify_coordinator(fresh, answer, TOKEN)


@pytest.mark.parametrize("proof", [b"", b"\0", bytes(32), bytes(64)])
def test_a_proof_of_any_length_is_only_wrong(proof: bytes) -> None:
    """A proof of any length is compared and rejected."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    assert not handshake.verify_member(opening, answer, proof, TOKEN)
    assert not handshake.verify_coordinator(opening, Challenge(1, answer.nonce, proof, has_token=True), TOKEN)


def test_fields_of_the_hello_cannot_be_shifted() -> None:
    """Moving bytes from one field to the next gives another proof."""
    first = Hello(1, "a1", 1, 0, 2, b"n", has_token=True)
    second = Hello(1, "a", 11, 0, 2, b"n", has_token=True)
    answer = handshake.challenge(first, TOKEN)
    assert handshake.member_proof(first, answer, TOKEN) != handshake.member_proof(second, answer, TOKEN)


def test_the_token_is_not_in_what_is_sent() -> None:
    """No message of the handshake contains the token."""
    opening = hello()
    answer = handshake.challenge(opening, TOKEN)
    sent = [msgspec.msgpack.encode(part) for part in (opening, answer)]
    assert not any(TOKEN in part for part in [*sent, handshake.member_proof(opening, answer, TOKEN)])
