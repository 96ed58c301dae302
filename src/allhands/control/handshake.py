"""The mutual proof that both ends hold the job's token, bound to job, attempt, rank and world size.

Each side contributes a fresh nonce, so a recorded exchange proves nothing later; each side's proof is
labelled, so one cannot be reflected as the other. Where no token is configured the key is empty: the
exchange then only checks that both sides mean the same job, and the caller knows that it proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from .messages import Challenge, Hello

__all__ = ["PROTOCOL", "challenge", "hello", "member_proof", "verify_coordinator", "verify_member"]

# Raised whenever the meaning of a message changes; ends that differ refuse each other by name.
PROTOCOL = 1

_NONCE_BYTES = 32


def hello(*, job: str, attempt: int, rank: int, world_size: int, token: bytes) -> Hello:
    """Return a member's opening message, with a fresh nonce."""
    return Hello(PROTOCOL, job, attempt, rank, world_size, secrets.token_bytes(_NONCE_BYTES), bool(token))


def challenge(opening: Hello, token: bytes) -> Challenge:
    """Return the coordinator's answer: its own proof over both nonces, and the demand for the member's."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return Challenge(PROTOCOL, nonce, _proof(b"coordinator", opening, nonce, token), bool(token))


def member_proof(opening: Hello, answer: Challenge, token: bytes) -> bytes:
    """Return the member's proof for ``answer``."""
    return _proof(b"member", opening, answer.nonce, token)


def verify_coordinator(opening: Hello, answer: Challenge, token: bytes) -> bool:
    """Tell whether the coordinator that sent ``answer`` holds the token."""
    return hmac.compare_digest(answer.proof, _proof(b"coordinator", opening, answer.nonce, token))


def verify_member(opening: Hello, answer: Challenge, proof: bytes, token: bytes) -> bool:
    """Tell whether the member that sent ``opening`` and ``proof`` holds the token."""
    return hmac.compare_digest(proof, _proof(b"member", opening, answer.nonce, token))


def _proof(label: bytes, opening: Hello, nonce: bytes, token: bytes) -> bytes:
    # msgpack is prefix-free, so no two different openings give the same bytes.
    transcript = msgspec.msgpack.encode((label, opening, nonce))
    return hmac.new(token, transcript, hashlib.sha256).digest()
