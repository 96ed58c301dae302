"""What the coordinator makes of a connection that ends before its proof came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allhands.control import handshake
from allhands.control.connection import Connection
from allhands.control.messages import GREETING, Proof, encode, pack
from allhands.control.wording import RANKS

TOKEN = b"open sesame"


class Ears:
    """A coordinator that notes who it is told about."""

    def __init__(self, token: bytes) -> None:
        self.token, self.roll = token, SimpleNamespace(wording=RANKS)
        self.away: list[int] = []
        self.left: list[str] = []

    def proof_failed(self, connection: Connection) -> None:
        """Note who could not prove itself."""
        self.away.append(connection.rank)

    def disconnected(self, _: Connection, how: str) -> None:
        """Note how it went."""
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
    ids=["nobody has a token", "a wrong proof", "only ours", "only its", "both"],
)
def test_a_member_that_goes_before_its_proof(ours: bytes, its: bytes, proof: bytes, away: list[int]) -> None:
    """Tokens can differ only where there are any: one that was killed or late in its handshake has the right one."""
    coordinator: Any = Ears(ours)
    connection = Connection(coordinator)
    opening = handshake.hello(job="night", attempt=0, rank=1, world_size=2, token=its)
    connection.data_received(GREETING + pack(encode(opening)))
    if proof:
        connection.data_received(pack(encode(Proof(proof))))
    connection.connection_lost(None)
    assert coordinator.away == away
    assert coordinator.left == ["its connection closed"]
