"""How a connection that ends before its proof is reported to the coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allhands.control import handshake
from allhands.control.connection import Connection
from allhands.control.messages import GREETING, Proof, encode, pack
from allhands.control.wording import RANKS

TOKEN = b"open sesame"


class FakeCoordinator:
    """A coordinator that records the connections reported to it."""

    def __init__(self, token: bytes) -> None:
        self.token, self.roll = token, SimpleNamespace(wording=RANKS)
        self.failed: list[int] = []
        self.left: list[str] = []

    def proof_failed(self, connection: Connection) -> None:
        """Record the rank whose proof failed."""
        self.failed.append(connection.rank)

    def disconnected(self, _: Connection, how: str) -> None:
        """Record the reason."""
        self.left.append(how)


@pytest.mark.parametrize(
    ("ours", "its", "proof", "away"),
    [
        (b"", b"", b"", []),
        (b"", b"", b"x" * 32, [1]),
        (TOKEN, b"", b"", [1]),
        (b"", TOKEN, b"", [1]),
        (TOKEN, TOKEN, b"", [1]),
    ],
    ids=["no token", "a wrong proof", "only ours", "only its", "both"],
)
def test_a_connection_that_ends_before_its_proof(ours: bytes, its: bytes, proof: bytes, away: list[int]) -> None:
    """A failed proof is reported only where one side has a token; otherwise the process ended or was late."""
    coordinator: Any = FakeCoordinator(ours)
    connection = Connection(coordinator)
    opening = handshake.hello(job="night", attempt=0, rank=1, world_size=2, token=its)
    connection.data_received(GREETING + pack(encode(opening)))
    if proof:
        connection.data_received(pack(encode(Proof(proof))))
    connection.connection_lost(None)
    assert coordinator.failed == away
    assert coordinator.left == ["its connection closed"]
