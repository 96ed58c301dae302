"""The words of every refusal of the roll call: each function takes what was observed and returns a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..diagnosis import Diagnosis, count, duration, join
from .arrival import Arrival

if TYPE_CHECKING:
    from .rollcall import RollCall

__all__ = [
    "by_node",
    "disagreement",
    "duplicate",
    "gpu_shared",
    "late",
    "missing",
    "out_of_range",
    "trouble",
    "turned_away",
]


def trouble(arrival: Arrival) -> Diagnosis:
    """A rank found something wrong on its own side: everyone is told the same."""
    found = arrival.claim.trouble
    if found is None:
        raise ValueError("this arrival has no trouble")
    return msgspec.structs.replace(
        found,
        who=str(arrival) if not found.who or found.who.startswith("this process") else found.who,
        ranks=found.ranks or (arrival.rank,),
        hosts=found.hosts or (arrival.claim.identity.host,),
    )


def duplicate(first: Arrival, second: Arrival) -> Diagnosis:
    """Two processes claim one rank."""
    same, party = first.claim.identity.host == second.claim.identity.host, first.party
    return Diagnosis(
        "duplicate-rank",
        f"two processes claim {first.party.noun} {first.rank} of {first.world_size}",
        who=f"{first} from {first.came_from} and {second} from {second.came_from}",
        why="both are connected at this moment, so neither is a restart of the other"
        + (f"; {_launched(first, second)}" if same else ""),
        fix=f"give each process its own {party.noun} ({party.number_from}), or end the job that is left over",
        ranks=(first.rank,),
        hosts=tuple(dict.fromkeys((first.claim.identity.host, second.claim.identity.host))),
    )


def _launched(first: Arrival, second: Arrival) -> str:
    if first.claim.identity.parent == second.claim.identity.parent:
        return "the same parent started both"
    return "different parents started them"


def out_of_range(arrival: Arrival) -> Diagnosis:
    """A rank is not below the world size."""
    party = arrival.party
    return Diagnosis(
        "rank-out-of-range",
        f"{party.noun} {arrival.rank} does not exist in a world of {arrival.world_size}",
        who=str(arrival),
        why=f"{party.noun}s go from 0 to {arrival.world_size - 1}",
        fix=f"check {party.number_from} against {party.size_from}; `allhands whoami` shows where each is from",
        ranks=(arrival.rank,),
        hosts=(arrival.claim.identity.host,),
    )


# What the launch environment decides; the rest is the script's own.
_TOLD = frozenset({"job-mismatch", "world-size-mismatch"})

# Ranks that were given no address find each other by their parent, which a wrapper around each of them hides.
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


def disagreement(slug: str, groups: Mapping[Any, Sequence[int]], arrivals: Mapping[int, Arrival]) -> Diagnosis:
    """Ranks state different things about what must be equal; the smaller groups are named as the odd ones."""
    party = next(iter(arrivals.values())).party
    thing, fix = (text.format(noun=party.noun, size=party.size, size_from=party.size_from) for text in _THING[slug])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), min(item[1])))
    odd = sorted(rank for _, members in ordered[1:] for rank in members)
    stated = join([f"{party.named(members)} {_says(slug, value, len(members))}" for value, members in ordered])
    everyone = {rank: arrivals[rank].claim.identity.host for rank in arrivals}
    return Diagnosis(
        slug,
        f"{party.noun}s disagree about the {thing}: {stated}",
        who=party.by_host(everyone),
        why="all of them are connected; " + _odd(slug, odd, arrivals),
        fix=fix,
        ranks=tuple(odd),
        hosts=tuple(dict.fromkeys(everyone[rank] for rank in odd)),
    )


def _odd(slug: str, odd: Sequence[int], arrivals: Mapping[int, Arrival]) -> str:
    sources: dict[str, list[int]] = {}
    named = next(iter(arrivals.values())).party.named
    for rank in odd:
        sources.setdefault(arrivals[rank].claim.launcher, []).append(rank)
    if slug in _TOLD:
        return join([f"{named(members)} took it from {source}" for source, members in sources.items()])
    return join([f"{source} started {named(members)}" for source, members in sources.items()])


def _says(slug: str, value: Any, number: int) -> str:
    end = "s" if number == 1 else ""
    match slug:
        case "job-mismatch":
            job, attempt = value
            return f"say{end} {job or 'no job name'}, attempt {attempt}"
        case "version-mismatch":
            torch, allhands = value
            return f"{'has' if end else 'have'} torch {torch or '(any)'}, allhands {allhands}"
        case "device-mismatch":
            return f"bring{end} {value or 'none in particular'}"
        case "backend-mismatch":
            return f"ask{end} for {value or 'the default'}"
        case _:
            return f"say{end} {value}"


def gpu_shared(arrivals: Sequence[Arrival]) -> Diagnosis:
    """Ranks on one host use one GPU, which NCCL refuses."""
    members = [arrival.rank for arrival in arrivals]
    host, gpu = arrivals[0].claim.identity.host, arrivals[0].claim.device
    return Diagnosis(
        "gpu-shared",
        f"{arrivals[0].party.named(members)} use the same GPU ({gpu} on {host}), which NCCL refuses",
        who=join([str(arrival) for arrival in arrivals[:4]]),
        why=f"all report the device {arrivals[0].claim.gpu}",
        fix="call torch.cuda.set_device(local_rank) before init, pass device_id=, or use backend='allhands', on which "
        "ranks may share a GPU",
        ranks=tuple(members),
        hosts=(host,),
    )


def by_node(absent: Sequence[int], state: RollCall) -> str:
    """Name missing ranks by the node they should be on, as far as those present show how nodes are numbered."""
    node_of = _nodes(state)
    if node_of is None:
        return state.party.named(absent)
    names = {arrival.claim.node_rank: arrival.claim.identity.host for arrival in state.present.values()}
    return state.party.by_host({rank: names.get(node_of(rank), f"node {node_of(rank)}") for rank in absent})


def _nodes(state: RollCall) -> Any:
    """Return rank -> node where every rank present fits "ranks are laid out node by node", else None."""
    width = next((arrival.claim.local_world_size for arrival in state.present.values()), -1)
    if width < 1:
        return None
    for arrival in state.present.values():
        claim = arrival.claim
        if claim.local_world_size != width or claim.node_rank != arrival.rank // width:
            return None
    return lambda rank: rank // width


def missing(now: float, absent: Sequence[int], state: RollCall) -> Diagnosis:
    """Someone never came."""
    here, party = len(state.present), state.party
    waited = duration(now - state.opened)
    froms = sorted({arrival.came_from for arrival in state.present.values()})
    came = f"{party.named(state.present)} reached {state.listening} from {join(froms[:8])}"
    reasons = [
        f"{arrival} came and went away after {duration(at - arrival.at)}"
        for rank, (arrival, at) in sorted(state.gone.items())[:4]
        if rank in absent
    ]
    silent = [rank for rank in absent if rank not in state.gone]
    if silent:
        reasons.append(f"nothing was ever heard from {by_node(silent, state)}")
    if state.only_loopback and not _known_to_be_one_host(state):
        reasons.append(f"the coordinator listens on loopback only, so {party.noun}s on other hosts cannot reach it")
    return Diagnosis(
        "missing-ranks",
        f"{here} of {count(here + len(absent), party.noun)} answered within {waited}",
        who=f"{party.named(state.present)} ({_hosts(state)}) waited for {by_node(absent, state)}",
        why="; ".join([*reasons, came]),
        fix=f"start {by_node(absent, state)} with this address ({party.show}), or mend what "
        f"{'its' if len(absent) == 1 else 'their'} own output says; or raise {party.timeout}"
        + (_BY_PARENT if state.nameless else ""),
        ranks=tuple(absent),
        hosts=tuple(sorted({arrival.claim.identity.host for arrival, _ in state.gone.values()})),
    )


def _known_to_be_one_host(state: RollCall) -> bool:
    # Nodes state how many ranks they start, which is another number than that of the nodes.
    arrivals = state.present.values()
    return state.party.noun == "rank" and all(each.claim.local_world_size == each.world_size for each in arrivals)


def turned_away(absent: Sequence[int], state: RollCall) -> Diagnosis:
    """Someone is missing, and someone who claimed that rank could not prove itself."""
    turned, party = [rank for rank in absent if rank in state.turned], state.party
    return Diagnosis(
        "not-authorised",
        f"{party.named(turned)} did not have the job's token",
        who=join([f"{party.noun} {rank} came from {state.turned[rank]}" for rank in turned[:8]]),
        why="what came under that number could not prove that it holds the token, and nothing better came in time",
        fix=f"give every {party.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
        ranks=tuple(turned),
    )


def _hosts(state: RollCall) -> str:
    return join(sorted({arrival.claim.identity.host for arrival in state.present.values()})[:8])


def late(newcomer: Arrival, state: RollCall, completed_wall: float, now: float) -> Diagnosis:
    """Someone comes after the group is complete: a double, or another job at the same address."""
    holder = state.present.get(newcomer.rank)
    if (newcomer.job, newcomer.attempt) != next(iter(state.disagreement("job-mismatch"))):
        return disagreement(
            "job-mismatch",
            {**state.disagreement("job-mismatch"), (newcomer.job, newcomer.attempt): [newcomer.rank]},
            {**state.present, newcomer.rank: newcomer},
        )
    if newcomer.claim.identity.started > completed_wall:
        root, noun = state.present.get(0), state.party.noun
        return Diagnosis(
            "port-in-use",
            f"{state.listening} belongs to another job, whose {count(state.world_size, noun)} are all there",
            who=f"{newcomer} met the job of {root}" if root else str(newcomer),
            why=f"this process started after that group was formed; that was {duration(now - state.opened)} ago",
            fix=f"end the other job, or choose another port ({state.party.port_from})",
            ranks=(newcomer.rank,),
            hosts=(newcomer.claim.identity.host,),
        )
    if newcomer.world_size != state.world_size or holder is None:
        sizes = {size: list(who) for size, who in state.disagreement("world-size-mismatch").items()}
        sizes.setdefault(newcomer.world_size, []).append(newcomer.rank)
        return disagreement("world-size-mismatch", sizes, {**state.present, newcomer.rank: newcomer})
    return duplicate(holder, newcomer)
