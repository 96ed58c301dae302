"""One member's answer to the roll call, as the coordinator saw it come."""

from __future__ import annotations

import msgspec

from .messages import Claim
from .wording import RANKS, Party

__all__ = ["Arrival"]


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """A claim with what the coordinator itself observed: where it came from, when, and its deadline."""

    rank: int
    world_size: int
    job: str
    attempt: int
    claim: Claim
    came_from: str
    at: float
    deadline: float
    party: Party = RANKS

    def __str__(self) -> str:
        return f"{self.party.noun} {self.rank} ({self.claim.identity})"
