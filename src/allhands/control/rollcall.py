"""The roll call: which members have answered, the decision that follows, and the diagnosis of each refusal.

Pure: no clock, no sockets. `RollCall` counts members in and out; `decide` reads it. Each costs O(1) per member, so a
roll call of n ranks costs O(n).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, count, duration, join
from .messages import Claim
from .wording import RANKS, Wording

__all__ = ["Arrival", "Completed", "Decision", "RefusedRoll", "RollCall", "Waits", "decide", "late"]


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """A claim with what the coordinator observed: the peer's address, the time, and the deadline."""

    rank: int
    world_size: int
    job: str
    attempt: int
    claim: Claim
    came_from: str
    at: float
    deadline: float
    wording: Wording = RANKS

    def __str__(self) -> str:
        return f"{self.wording.noun} {self.rank} ({self.claim.identity})"


class Completed(msgspec.Struct, frozen=True):
    """Every rank answered, and the claims agree."""

    explanation: str
    one_host: bool


class Waits(msgspec.Struct, frozen=True):
    """Ranks are missing and the deadline has not passed."""

    now: float
    state: RollCall

    @property
    def explanation(self) -> str:
        """The missing ranks by node. A property because it costs O(n): it is needed once a second, not per arrival."""
        size, here, noun = self.state.world_size, self.state.present, self.state.wording.noun
        names = _by_node([rank for rank in range(size) if rank not in here], self.state)
        waited = duration(self.now - self.state.opened)
        return f"{len(here)} of {size or '?'} {noun}s are here; waiting for {names or 'the first'} ({waited})"


class RefusedRoll(msgspec.Struct, frozen=True):
    """The group cannot form."""

    diagnosis: Diagnosis


Decision = Completed | Waits | RefusedRoll

# Limits how many failed authentications are remembered.
_MOST_UNPROVEN = 65_536

# What must be equal on all ranks: the slug of a disagreement, and the value; None is not compared.
_EQUAL: tuple[tuple[str, Callable[[Arrival], Hashable]], ...] = (
    ("job-mismatch", lambda arrival: (arrival.job, arrival.attempt)),
    ("world-size-mismatch", lambda arrival: arrival.world_size),
    ("backend-mismatch", lambda arrival: arrival.claim.backend),
    ("version-mismatch", lambda arrival: _versions(arrival.claim)),
    # A rank may not have selected a device yet.
    ("device-mismatch", lambda arrival: arrival.claim.device.partition(":")[0] or None),
)


# All properties whose ranks are counted.
_COUNTED: tuple[tuple[str, Callable[[Arrival], Hashable]], ...] = (
    *_EQUAL,
    ("host", lambda arrival: arrival.claim.identity.key),
    ("gpu", lambda arrival: (arrival.claim.identity.key, arrival.claim.gpu) if arrival.claim.gpu else None),
)


def _versions(claim: Claim) -> tuple[str, str]:
    # Patch releases keep torch's wire formats. With mixed_versions the user accepts any difference of torch.
    torch = "" if claim.mixed_versions else ".".join(claim.torch.split(".")[:2])
    return torch, claim.allhands


class RollCall(msgspec.Struct):
    """The state of one roll call. ``listening`` is the coordinator's address, for messages."""

    opened: float
    listening: str = ""
    only_loopback: bool = False
    wording: Wording = RANKS
    # Ranks derive the name of the coordinator's socket; no address or file was given.
    derived_name: bool = False
    present: dict[int, Arrival] = msgspec.field(default_factory=dict)
    doubles: list[tuple[Arrival, Arrival]] = msgspec.field(default_factory=list)
    troubled: list[Arrival] = msgspec.field(default_factory=list)
    outside: list[Arrival] = msgspec.field(default_factory=list)
    gone: dict[int, tuple[Arrival, float]] = msgspec.field(default_factory=dict)
    unproven: dict[int, str] = msgspec.field(default_factory=dict)
    deadline: float = float("inf")
    _values: dict[str, dict[Any, list[int]]] = msgspec.field(default_factory=dict)
    _shared_gpus: set[Hashable] = msgspec.field(default_factory=set)

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
        for name, key in _COUNTED:
            value = key(arrival)
            if value is not None:
                members = self._values.setdefault(name, {}).setdefault(value, [])
                members.append(rank)
                if name == "gpu" and len(members) > 1:
                    self._shared_gpus.add(value)

    def leave(self, arrival: Arrival, now: float) -> None:
        """Count a member out whose connection ended during the roll call; its rank may answer again."""
        if self.present.get(arrival.rank) is not arrival:
            return
        del self.present[arrival.rank]
        self.gone[arrival.rank] = (arrival, now)
        for table in self._values.values():
            for key, members in list(table.items()):
                if arrival.rank in members:
                    members.remove(arrival.rank)
                    if not members:
                        del table[key]
        self.deadline = min((other.deadline for other in self.present.values()), default=float("inf"))

    def again(self, arrival: Arrival) -> bool:
        """Return whether a member's process answers for its next group, before the end of this one was noticed."""
        earlier = self.present.get(arrival.rank)
        if earlier is None:
            return False
        before, now = earlier.claim, arrival.claim
        same = (before.identity.key, before.identity.pid) == (now.identity.key, now.identity.pid)
        return same and now.generation > before.generation

    def refuse_proof(self, rank: int, came_from: str) -> None:
        """Remember that a process without the job's token claimed ``rank``."""
        if 0 <= rank < _MOST_UNPROVEN:
            self.unproven[rank] = came_from

    @property
    def world_size(self) -> int:
        """The world size of the claims (the first one if they disagree); 0 before the first claim."""
        return next(iter(self.values("world-size-mismatch")), 0)

    def values(self, name: str) -> dict[Any, list[int]]:
        """Return each claimed value of a property (a slug, "host" or "gpu") with the ranks that claim it."""
        return self._values.get(name, {})

    @property
    def shared_gpu(self) -> list[int]:
        """The ranks of the first GPU that more than one rank uses, or []."""
        shared = (self.values("gpu").get(gpu, []) for gpu in self._shared_gpus)
        return next((members for members in shared if len(members) > 1), [])


def decide(now: float, state: RollCall) -> Decision:
    """Return what follows from the answers so far: complete, wait, or refuse, each with its explanation."""
    if state.troubled:
        return RefusedRoll(_trouble(state.troubled[0]))
    for slug, _ in _EQUAL:
        groups = state.values(slug)
        if len(groups) > 1:
            arrivals = {rank: state.present[rank] for members in groups.values() for rank in members}
            return RefusedRoll(_disagreement(slug, groups, arrivals))
    if state.outside:
        return RefusedRoll(_out_of_range(state.outside[0]))
    if state.doubles:
        return RefusedRoll(_duplicate(*state.doubles[0]))
    size = state.world_size
    if state.shared_gpu and any("nccl" in backend for backend in state.values("backend-mismatch")):
        return RefusedRoll(_gpu_shared([state.present[rank] for rank in state.shared_gpu]))
    if size and len(state.present) == size:
        words = f"all {size} {state.wording.noun}s answered after {duration(now - state.opened)}"
        return Completed(words, one_host=len(state.values("host")) == 1)
    if now >= state.deadline:
        absent = [rank for rank in range(size) if rank not in state.present]
        if any(rank in state.unproven for rank in absent):
            return RefusedRoll(_without_token(absent, state))
        return RefusedRoll(_missing(now, absent, state))
    return Waits(now, state)


# The diagnosis of each refusal -----------------------------------------------------------------------------------


def _trouble(arrival: Arrival) -> Diagnosis:
    """Return a rank's own error, with the rank added."""
    found = arrival.claim.trouble
    if found is None:
        raise ValueError("this arrival has no trouble")
    return msgspec.structs.replace(
        found,
        who=str(arrival) if not found.who or found.who.startswith("this process") else found.who,
        ranks=found.ranks or (arrival.rank,),
        hosts=found.hosts or (arrival.claim.identity.host,),
    )


def _duplicate(first: Arrival, second: Arrival) -> Diagnosis:
    one, other, wording = first.claim.identity, second.claim.identity, first.wording
    why = "both are connected at this moment, so neither is a restart of the other"
    if one.host == other.host:
        started = "the same parent" if one.parent == other.parent else "different parents"
        why = f"{why}; {started} started {'both' if one.parent == other.parent else 'them'}"
    return Diagnosis(
        "duplicate-rank",
        f"two processes claim {wording.noun} {first.rank} of {first.world_size}",
        who=f"{first} from {first.came_from} and {second} from {second.came_from}",
        why=why,
        fix=f"give each process its own {wording.noun} ({wording.number_from}), or end the leftover job",
        ranks=(first.rank,),
        hosts=tuple(dict.fromkeys((one.host, other.host))),
    )


def _out_of_range(arrival: Arrival) -> Diagnosis:
    wording = arrival.wording
    return Diagnosis(
        "rank-out-of-range",
        f"{wording.noun} {arrival.rank} does not exist in a world of {arrival.world_size}",
        who=str(arrival),
        why=f"{wording.noun}s go from 0 to {arrival.world_size - 1}",
        fix=f"check {wording.number_from} against {wording.size_from}; `allhands whoami` shows the source of each",
        ranks=(arrival.rank,),
        hosts=(arrival.claim.identity.host,),
    )


# The launch environment sets these; the script sets the others.
_FROM_ENVIRONMENT = frozenset({"job-mismatch", "world-size-mismatch"})

# Ranks without an address meet at a name derived from their parent process, which a wrapper around each rank changes.
_BY_PARENT = "; ranks that different processes start need tcp://HOST:PORT, or the same ALLHANDS_JOB on all"

_THING = {
    "job-mismatch": (
        "job",
        "give every job an address of its own, and every {noun} of a job the same name (ALLHANDS_JOB, --rdzv-id)",
    ),
    "world-size-mismatch": ("{size}", "start every {noun} with the same {size_from}"),
    "backend-mismatch": ("backend", "pass the same backend= on every {noun}"),
    "version-mismatch": (
        "versions",
        "install the same torch and allhands everywhere; ALLHANDS_MIXED_VERSIONS=1 allows torch to differ",
    ),
    "device-mismatch": ("device", "give every {noun} the same kind of device_id="),
}


def _disagreement(slug: str, groups: Mapping[Any, Sequence[int]], arrivals: Mapping[int, Arrival]) -> Diagnosis:
    """Return the diagnosis of claims that differ; the ranks in the smaller groups are named as the odd ones."""
    wording = next(iter(arrivals.values())).wording
    words = {"noun": wording.noun, "size": wording.size, "size_from": wording.size_from}
    thing, fix = (text.format(**words) for text in _THING[slug])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), min(item[1])))
    odd = sorted(rank for _, members in ordered[1:] for rank in members)
    stated = join([f"{wording.named(members)} {_claims(slug, value, len(members))}" for value, members in ordered])
    everyone = {rank: arrivals[rank].claim.identity.host for rank in arrivals}
    launchers: dict[str, list[int]] = {}
    for rank in odd:
        launchers.setdefault(arrivals[rank].claim.launcher, []).append(rank)
    if slug in _FROM_ENVIRONMENT:
        origin = join([f"{wording.named(members)} read it from {source}" for source, members in launchers.items()])
    else:
        origin = join([f"{source} started {wording.named(members)}" for source, members in launchers.items()])
    return Diagnosis(
        slug,
        f"{wording.noun}s disagree about the {thing}: {stated}",
        who=wording.by_host(everyone),
        why=f"all of them are connected; {origin}",
        fix=fix,
        ranks=tuple(odd),
        hosts=tuple(dict.fromkeys(everyone[rank] for rank in odd)),
    )


def _claims(slug: str, value: Any, number: int) -> str:
    end = "s" if number == 1 else ""
    match slug:
        case "job-mismatch":
            job, attempt = value
            return f"claim{end} {job or 'no job name'}, attempt {attempt}"
        case "version-mismatch":
            torch, allhands = value
            return f"{'has' if end else 'have'} torch {torch or '(any)'}, allhands {allhands}"
        case "device-mismatch":
            return f"use{end} {value or 'none in particular'}"
        case "backend-mismatch":
            return f"request{end} {value or 'the default'}"
        case _:
            return f"claim{end} {value}"


def _gpu_shared(arrivals: Sequence[Arrival]) -> Diagnosis:
    members = [arrival.rank for arrival in arrivals]
    host, gpu = arrivals[0].claim.identity.host, arrivals[0].claim.device
    return Diagnosis(
        "gpu-shared",
        f"{arrivals[0].wording.named(members)} use the same GPU ({gpu} on {host}), which NCCL refuses",
        who=join([str(arrival) for arrival in arrivals[:4]]),
        why=f"all report the device {arrivals[0].claim.gpu}",
        fix="call torch.cuda.set_device(local_rank) before init, pass device_id=, or use backend='allhands', on which "
        "ranks may share a GPU",
        ranks=tuple(members),
        hosts=(host,),
    )


def _missing(now: float, absent: Sequence[int], state: RollCall) -> Diagnosis:
    here, wording = len(state.present), state.wording
    waited = duration(now - state.opened)
    sources = sorted({arrival.came_from for arrival in state.present.values()})
    reached = f"{wording.named(state.present)} reached {state.listening} from {join(sources[:8])}"
    reasons = [
        f"{arrival} connected and disconnected after {duration(at - arrival.at)}"
        for rank, (arrival, at) in sorted(state.gone.items())[:4]
        if rank in absent
    ]
    silent = [rank for rank in absent if rank not in state.gone]
    if silent:
        reasons.append(f"nothing was ever received from {_by_node(silent, state)}")
    if state.only_loopback and not _known_to_be_one_host(state):
        reasons.append(f"the coordinator listens on loopback only, so {wording.noun}s on other hosts cannot reach it")
    names = _by_node(absent, state)
    hosts = join(sorted({arrival.claim.identity.host for arrival in state.present.values()})[:8])
    return Diagnosis(
        "missing-ranks",
        f"{here} of {count(here + len(absent), wording.noun)} answered within {waited}",
        who=f"{wording.named(state.present)} ({hosts}) waited for {names}",
        why="; ".join([*reasons, reached]),
        fix=f"start {names} with this address ({wording.show}), or correct the error in "
        f"{'its' if len(absent) == 1 else 'their'} own output; or raise {wording.timeout}"
        + (_BY_PARENT if state.derived_name else ""),
        ranks=tuple(absent),
        hosts=tuple(sorted({arrival.claim.identity.host for arrival, _ in state.gone.values()})),
    )


def _known_to_be_one_host(state: RollCall) -> bool:
    # For nodes, local_world_size counts ranks and world_size counts nodes.
    arrivals = state.present.values()
    return state.wording.noun == "rank" and all(each.claim.local_world_size == each.world_size for each in arrivals)


def _by_node(ranks: Sequence[int], state: RollCall) -> str:
    """Name ``ranks`` by the node they should be on, if the claims show that ranks are numbered node by node."""
    claims = [(arrival.rank, arrival.claim) for arrival in state.present.values()]
    width = claims[0][1].local_world_size if claims else -1
    if width < 1 or any(c.local_world_size != width or c.node_rank != rank // width for rank, c in claims):
        return state.wording.named(ranks)
    names = {claim.node_rank: claim.identity.host for _, claim in claims}
    return state.wording.by_host({rank: names.get(rank // width, f"node {rank // width}") for rank in ranks})


def _without_token(absent: Sequence[int], state: RollCall) -> Diagnosis:
    refused, wording = [rank for rank in absent if rank in state.unproven], state.wording
    return Diagnosis(
        "not-authorised",
        f"{wording.named(refused)} did not have the job's token",
        who=join([f"{wording.noun} {rank} connected from {state.unproven[rank]}" for rank in refused[:8]]),
        why="the process that claimed that number failed the proof that it holds the token, and no other came in time",
        fix=f"give every {wording.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
        ranks=tuple(refused),
    )


def late(newcomer: Arrival, state: RollCall, completed_wall: float, now: float) -> Diagnosis:
    """Return the refusal of a process that answers after the group is complete: a duplicate, or another job."""
    earlier = state.present.get(newcomer.rank)
    jobs, job = state.values("job-mismatch"), (newcomer.job, newcomer.attempt)
    everyone = {**state.present, newcomer.rank: newcomer}
    if job != next(iter(jobs)):
        return _disagreement("job-mismatch", {**jobs, job: [newcomer.rank]}, everyone)
    if newcomer.claim.identity.started > completed_wall:
        root, noun = state.present.get(0), state.wording.noun
        return Diagnosis(
            "port-in-use",
            f"{state.listening} belongs to another job, whose {count(state.world_size, noun)} are complete",
            who=f"{newcomer} met the job of {root}" if root else str(newcomer),
            why=f"this process started after that group was formed; that was {duration(now - state.opened)} ago",
            fix=f"end the other job, or choose another port ({state.wording.port_from})",
            ranks=(newcomer.rank,),
            hosts=(newcomer.claim.identity.host,),
        )
    if newcomer.world_size != state.world_size or earlier is None:
        sizes = {size: list(members) for size, members in state.values("world-size-mismatch").items()}
        sizes.setdefault(newcomer.world_size, []).append(newcomer.rank)
        return _disagreement("world-size-mismatch", sizes, everyone)
    return _duplicate(earlier, newcomer)
