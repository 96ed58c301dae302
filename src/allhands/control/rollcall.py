"""The roll call: who has answered, and what follows from it. Pure: no clock, no sockets, no sleeping.

`RollCall` only keeps count as members come and go; `decide` reads it. Both cost the same however many
ranks there are, so that a roll call of n ranks costs n.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, duration
from . import diagnoses
from .arrival import Arrival
from .messages import Claim
from .wording import RANKS, Party

__all__ = ["Completed", "Decision", "RefusedRoll", "RollCall", "Waits", "decide"]


class Completed(msgspec.Struct, frozen=True):
    """Every rank answered, and the answers fit."""

    explanation: str
    one_host: bool


class Waits(msgspec.Struct, frozen=True):
    """Someone is missing and there is time left.

    The words cost as much as there are ranks, so they are found when asked for: once a second, not once
    an arrival.
    """

    now: float
    state: RollCall

    @property
    def explanation(self) -> str:
        """Who is here and who is missing, by node."""
        size, here, noun = self.state.world_size, self.state.present, self.state.party.noun
        names = diagnoses.by_node([rank for rank in range(size) if rank not in here], self.state)
        waited = duration(self.now - self.state.opened)
        return f"{len(here)} of {size or '?'} {noun}s are here; waiting for {names or 'the first'} ({waited})"


class RefusedRoll(msgspec.Struct, frozen=True):
    """The group cannot form."""

    diagnosis: Diagnosis


Decision = Completed | Waits | RefusedRoll

# Bounds what strangers can make the coordinator remember.
_MOST_TURNED = 65_536

# What must be equal on all ranks: the attribute, and the words for a disagreement.
_EQUAL: tuple[tuple[str, Callable[[Arrival], Hashable]], ...] = (
    ("job-mismatch", lambda arrival: (arrival.job, arrival.attempt)),
    ("world-size-mismatch", lambda arrival: arrival.world_size),
    ("backend-mismatch", lambda arrival: arrival.claim.backend),
    ("version-mismatch", lambda arrival: _versions(arrival.claim)),
    # Only kinds that are stated: a rank that has not touched its GPU yet says nothing about it.
    ("device-mismatch", lambda arrival: arrival.claim.device.partition(":")[0] or None),
)


def _versions(claim: Claim) -> tuple[str, str]:
    # A patch release keeps torch's wire formats; mixed_versions is the user's word that the rest works too.
    torch = "" if claim.mixed_versions else ".".join(claim.torch.split(".")[:2])
    return torch, claim.allhands


class RollCall(msgspec.Struct):
    """The state of one roll call. ``listening`` is where the coordinator can be reached, for the words."""

    opened: float
    listening: str = ""
    only_loopback: bool = False
    party: Party = RANKS
    # Ranks meet by a name that they derive, not by an address or a board that they were given.
    nameless: bool = False
    present: dict[int, Arrival] = msgspec.field(default_factory=dict)
    doubles: list[tuple[Arrival, Arrival]] = msgspec.field(default_factory=list)
    troubled: list[Arrival] = msgspec.field(default_factory=list)
    outside: list[Arrival] = msgspec.field(default_factory=list)
    gone: dict[int, tuple[Arrival, float]] = msgspec.field(default_factory=dict)
    turned: dict[int, str] = msgspec.field(default_factory=dict)
    deadline: float = float("inf")
    _seen: dict[str, dict[Any, list[int]]] = msgspec.field(default_factory=dict)
    _gpus: dict[tuple[str, str], list[int]] = msgspec.field(default_factory=dict)
    _shared_gpus: set[tuple[str, str]] = msgspec.field(default_factory=set)
    _hosts: dict[str, list[int]] = msgspec.field(default_factory=dict)

    def arrive(self, arrival: Arrival) -> None:
        """Count a member in."""
        rank, claim = arrival.rank, arrival.claim
        self.deadline = min(self.deadline, arrival.deadline)
        if claim.trouble is not None:
            self.troubled.append(arrival)
        if not 0 <= rank < arrival.world_size:
            self.outside.append(arrival)
        if rank in self.present:
            self.doubles.append((self.present[rank], arrival))
            return
        self.present[rank] = arrival
        self.gone.pop(rank, None)
        for slug, key in _EQUAL:
            value = key(arrival)
            if value is not None:
                self._seen.setdefault(slug, {}).setdefault(value, []).append(rank)
        self._hosts.setdefault(claim.identity.key, []).append(rank)
        if claim.gpu:
            gpu = (claim.identity.key, claim.gpu)
            self._gpus.setdefault(gpu, []).append(rank)
            if len(self._gpus[gpu]) > 1:
                self._shared_gpus.add(gpu)

    def leave(self, arrival: Arrival, now: float) -> None:
        """Count a member out whose connection ended before the roll call did; its rank may come again."""
        if self.present.get(arrival.rank) is not arrival:
            return
        del self.present[arrival.rank]
        self.gone[arrival.rank] = (arrival, now)
        tables: list[dict[Any, list[int]]] = [self._hosts, self._gpus, *self._seen.values()]
        for table in tables:
            for key, members in list(table.items()):
                if arrival.rank in members:
                    members.remove(arrival.rank)
                    if not members:
                        del table[key]
        # Its deadline no longer binds anyone; the others' do.
        self.deadline = min((other.deadline for other in self.present.values()), default=float("inf"))

    def again(self, arrival: Arrival) -> bool:
        """Tell whether a member comes once more: for the next group, being done with this one before we heard of it."""
        holder = self.present.get(arrival.rank)
        if holder is None:
            return False
        before, now = holder.claim, arrival.claim
        same = (before.identity.key, before.identity.pid) == (now.identity.key, now.identity.pid)
        return same and now.generation > before.generation

    def turn_away(self, rank: int, came_from: str) -> None:
        """Remember that someone who could not prove itself claimed ``rank``."""
        # Strangers choose the number; only so many are kept.
        if 0 <= rank < _MOST_TURNED:
            self.turned[rank] = came_from

    @property
    def world_size(self) -> int:
        """The world size that those present state (any of them, where they disagree); 0 with no one here."""
        sizes = self._seen.get("world-size-mismatch", {})
        return next(iter(sizes), 0)

    def disagreement(self, slug: str) -> dict[Any, list[int]]:
        """Return who states what about the thing ``slug`` is about."""
        return self._seen.get(slug, {})

    @property
    def shared_gpu(self) -> list[int]:
        """The ranks of the first GPU that more than one rank uses, or []."""
        shared = (self._gpus.get(gpu, []) for gpu in self._shared_gpus)
        return next((members for members in shared if len(members) > 1), [])

    @property
    def hosts(self) -> int:
        """How many different hosts were seen."""
        return len(self._hosts)


def decide(now: float, state: RollCall) -> Decision:
    """Say what follows from who has answered so far: complete, wait, or refuse, with the reason in words."""
    if state.troubled:
        return RefusedRoll(diagnoses.trouble(state.troubled[0]))
    disagreement = _disagreement(state)
    if disagreement is not None:
        return RefusedRoll(disagreement)
    if state.doubles:
        return RefusedRoll(diagnoses.duplicate(*state.doubles[0]))
    size = state.world_size
    if state.shared_gpu and _uses_nccl(state):
        return RefusedRoll(diagnoses.gpu_shared([state.present[rank] for rank in state.shared_gpu]))
    if size and len(state.present) == size:
        words = f"all {size} {state.party.noun}s answered after {duration(now - state.opened)}"
        return Completed(words, one_host=state.hosts == 1)
    if now >= state.deadline:
        absent = [rank for rank in range(size) if rank not in state.present]
        if any(rank in state.turned for rank in absent):
            return RefusedRoll(diagnoses.turned_away(absent, state))
        return RefusedRoll(diagnoses.missing(now, absent, state))
    return Waits(now, state)


def _disagreement(state: RollCall) -> Diagnosis | None:
    for slug, _ in _EQUAL:
        groups = state.disagreement(slug)
        if len(groups) > 1:
            arrivals = {rank: state.present[rank] for members in groups.values() for rank in members}
            return diagnoses.disagreement(slug, groups, arrivals)
    return diagnoses.out_of_range(state.outside[0]) if state.outside else None


def _uses_nccl(state: RollCall) -> bool:
    return any("nccl" in backend for backend in state.disagreement("backend-mismatch"))
