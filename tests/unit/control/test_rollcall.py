from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from allhands.control.messages import Claim
from allhands.control.process_identity import Identity
from allhands.control.rollcall import Arrival, Completed, RefusedRoll, RollCall, Waits, decide, late
from allhands.control.wording import NODES
from allhands.diagnosis import Diagnosis

# The roll call opens at 0 and everyone's time is up a minute later, unless a test says otherwise.
OPENED, DEADLINE = 0.0, 60.0


def arrival(rank: int, world_size: int = 4, *, host: str = "node-a", **other: Any) -> Arrival:
    """Return the arrival of one rank; ``other`` overrides parts of the arrival or of its claim."""
    identity = Identity(host, f"key of {host}", 1000 + rank, other.pop("started", 5.0), other.pop("parent", "shell"))
    seen: dict[str, Any] = {
        "job": "night",
        "attempt": 0,
        "came_from": f"10.0.0.{ord(host[-1])}",
        "at": 1.0,
        "deadline": DEADLINE,
    }
    seen |= {name: other.pop(name) for name in list(seen) if name in other}
    claim: dict[str, Any] = {
        "backend": "gloo",
        "device": "",
        "gpu": "",
        "torch": "2.13.0",
        "allhands": "0.1.0",
        "launcher": "torchrun",
        "timeout_s": 60.0,
    }
    return Arrival(rank=rank, world_size=world_size, claim=Claim(identity, **(claim | other)), **seen)


def called(*arrivals: Arrival) -> RollCall:
    """Return a roll call with these arrivals."""
    state = RollCall(OPENED, listening="node-a:29500")
    for each in arrivals:
        state.arrive(each)
    return state


def refused(state: RollCall, now: float = 2.0) -> Diagnosis:
    """Return the diagnosis of a refused roll call; fail if it is not refused."""
    decision = decide(now, state)
    assert isinstance(decision, RefusedRoll)
    return decision.diagnosis


def waiting(state: RollCall, now: float = 2.0) -> str:
    """Return the explanation of a roll call that waits; fail if it does not wait."""
    decision = decide(now, state)
    assert isinstance(decision, Waits)
    return decision.explanation


# Everyone is here ------------------------------------------------------------------------------------------------


def test_all_ranks_on_one_host_complete_the_roll_call() -> None:
    """The roll call is complete with the last rank and not before, and reports that there is one host."""
    state = called(*(arrival(rank) for rank in (2, 0, 3)))
    assert isinstance(decide(2.0, state), Waits)
    state.arrive(arrival(1))
    decision = decide(2.5, state)
    assert decision == Completed("all 4 ranks answered after 2.5 s", one_host=True)


def test_several_hosts_are_not_one_host() -> None:
    """Ranks with different host keys are on several hosts, even under one host name."""
    other = arrival(1, 2, host="node-a")
    identity = other.claim.identity
    elsewhere = Identity(identity.host, "another kernel", identity.pid, identity.started, identity.parent)
    moved = Claim(elsewhere, "gloo", "", "", "2.13.0", "0.1.0", "torchrun", 60.0)
    state = called(arrival(0, 2), Arrival(1, 2, "night", 0, moved, "10.0.0.2", 1.0, DEADLINE))
    decision = decide(2.0, state)
    assert isinstance(decision, Completed)
    assert not decision.one_host


def test_a_world_of_one_completes_at_once() -> None:
    """The roll call of a single rank is complete with it."""
    assert isinstance(decide(0.0, called(arrival(0, 1))), Completed)


def test_completeness_beats_the_deadline() -> None:
    """If the last rank arrives exactly at the deadline, the group forms."""
    assert isinstance(decide(DEADLINE, called(arrival(0, 2), arrival(1, 2))), Completed)


# Waiting ---------------------------------------------------------------------------------------------------------


def test_an_empty_roll_call_waits() -> None:
    """Before the first rank there is no world size and no deadline."""
    assert waiting(called(), now=1e9).startswith("0 of ? ranks are here; waiting for the first")


def test_waiting_names_the_missing_ranks() -> None:
    """Without the numbers of the nodes, missing ranks are named by number."""
    assert waiting(called(arrival(0, 8), arrival(5, 8)), now=12.0) == (
        "2 of 8 ranks are here; waiting for ranks 1-4, 6 and 7 (12 s)"
    )


def test_waiting_names_the_missing_ranks_by_node() -> None:
    """If the present ranks are numbered node by node, missing ranks are named by node, or by its host if known."""
    state = called(
        arrival(0, 6, host="node-a", node_rank=0, local_world_size=2),
        arrival(2, 6, host="node-b", node_rank=1, local_world_size=2),
    )
    assert waiting(state) == (
        "2 of 6 ranks are here; waiting for rank 1 (node-a), rank 3 (node-b) and ranks 4 and 5 (node 2) (2 s)"
    )


@pytest.mark.parametrize("odd", [{"node_rank": 0, "local_world_size": 2}, {"node_rank": 1, "local_world_size": 3}, {}])
def test_nodes_are_named_only_if_all_ranks_fit(odd: dict[str, Any]) -> None:
    """One rank that does not fit "node by node" is enough to name no nodes at all."""
    state = called(arrival(0, 6, node_rank=0, local_world_size=2), arrival(2, 6, **odd))
    assert "waiting for ranks 1 and 3-5 (" in waiting(state)
    assert "node" not in waiting(state)


def test_a_rank_may_leave_and_answer_again() -> None:
    """A rank that disconnected is missing again, its claim no longer counts, and its restart completes the group."""
    first = arrival(1, 2, backend="nccl", job="other", torch="1.0", device="cuda:0", gpu="GPU-1", host="node-b")
    state = RollCall(OPENED)
    state.arrive(first)
    state.leave(first, 3.0)
    assert state.world_size == 0
    state.arrive(arrival(0, 2))
    assert waiting(state) == "1 of 2 ranks are here; waiting for rank 1 (2 s)"
    state.arrive(arrival(1, 2))
    decision = decide(4.0, state)
    assert isinstance(decision, Completed)
    assert decision.one_host


def test_only_a_counted_arrival_can_leave() -> None:
    """The end of a connection that was never counted, or was counted out before, changes nothing."""
    first, second = arrival(1, 2), arrival(1, 2)
    state = called(arrival(0, 2), first)
    state.leave(second, 3.0)
    assert state.present[1] is first
    state.leave(first, 3.0)
    state.arrive(second)
    state.leave(first, 4.0)
    assert state.present[1] is second
    assert isinstance(decide(5.0, state), Completed)


# Refused at once -------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_refuses_all() -> None:
    """An error that one rank found before it connected is sent to all, with the rank and its host."""
    found = Diagnosis("nccl-missing", "this torch has no NCCL", fix="use gloo")
    diagnosis = refused(called(arrival(0), arrival(2, host="node-b", trouble=found)))
    assert (diagnosis.slug, diagnosis.what, diagnosis.fix) == ("nccl-missing", "this torch has no NCCL", "use gloo")
    assert (diagnosis.ranks, diagnosis.hosts) == ((2,), ("node-b",))
    assert diagnosis.who == "rank 2 (node-b, pid 1002)"


def test_an_error_of_one_rank_is_passed_on_unchanged() -> None:
    """An error that names its rank is passed on unchanged, and precedes its consequences."""
    found = Diagnosis("rank-out-of-range", "rank 9 …", who="rank 9 (node-c)", ranks=(9,), hosts=("node-c",))
    assert refused(called(arrival(0), arrival(9, trouble=found))) == found


def test_two_processes_with_one_rank() -> None:
    """Two processes that claim one rank are refused at once, and both are named."""
    diagnosis = refused(called(arrival(0), arrival(1, host="node-b"), arrival(1, host="node-c")))
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("duplicate-rank", (1,), ("node-b", "node-c"))
    assert diagnosis.what == "two processes claim rank 1 of 4"
    assert diagnosis.who == "rank 1 (node-b, pid 1001) from 10.0.0.98 and rank 1 (node-c, pid 1001) from 10.0.0.99"
    assert "parent" not in diagnosis.why


@pytest.mark.parametrize(
    ("parent", "words"), [("shell", "the same parent started both"), ("cron", "different parents started them")]
)
def test_two_processes_with_one_rank_on_one_host(parent: str, words: str) -> None:
    """On one host the reason also states whether one program started both."""
    diagnosis = refused(called(arrival(1), arrival(1, parent=parent)))
    assert (diagnosis.slug, diagnosis.hosts) == ("duplicate-rank", ("node-a",))
    assert diagnosis.why.endswith(words)


@pytest.mark.parametrize("rank", [4, 99, -1])
def test_a_rank_outside_of_the_world(rank: int) -> None:
    """A rank that is not below the world size is refused at once."""
    diagnosis = refused(called(arrival(0), arrival(rank, host="node-b")))
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("rank-out-of-range", (rank,), ("node-b",))
    assert (diagnosis.what, diagnosis.why) == (f"rank {rank} does not exist in a world of 4", "ranks go from 0 to 3")


@pytest.mark.parametrize(
    ("slug", "odd", "words"),
    [
        ("job-mismatch", {"job": "day"}, "ranks 0 and 1 claim night, attempt 0 and rank 2 claims day, attempt 0"),
        ("job-mismatch", {"attempt": 1}, "ranks 0 and 1 claim night, attempt 0 and rank 2 claims night, attempt 1"),
        ("job-mismatch", {"job": ""}, "ranks 0 and 1 claim night, attempt 0 and rank 2 claims no job name, attempt 0"),
        ("world-size-mismatch", {"world_size": 8}, "ranks 0 and 1 claim 4 and rank 2 claims 8"),
        ("backend-mismatch", {"backend": "nccl"}, "ranks 0 and 1 request gloo and rank 2 requests nccl"),
        ("backend-mismatch", {"backend": ""}, "ranks 0 and 1 request gloo and rank 2 requests the default"),
        ("version-mismatch", {"torch": "2.12.0"}, "and rank 2 has torch 2.12, allhands 0.1.0"),
        ("version-mismatch", {"allhands": "0.2.0"}, "and rank 2 has torch 2.13, allhands 0.2.0"),
        ("device-mismatch", {"device": "cuda:0"}, "use xpu and rank 2 uses cuda"),
    ],
)
def test_ranks_disagree(slug: str, odd: dict[str, Any], words: str) -> None:
    """A rank with a different claim is refused as soon as it arrives, and all ranks receive the same diagnosis."""
    usual = {"device": "xpu:0"} if slug == "device-mismatch" else {}
    state = called(arrival(0, **usual), arrival(1, **usual), arrival(2, host="node-b", launcher="slurm", **odd))
    diagnosis = refused(state)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == (slug, (2,), ("node-b",))
    assert diagnosis.what.endswith(words)
    assert diagnosis.who == "ranks 0 and 1 (node-a) and rank 2 (node-b)"
    told = "rank 2 read it from slurm" if slug in {"job-mismatch", "world-size-mismatch"} else "slurm started rank 2"
    assert diagnosis.why == f"all of them are connected; {told}"


def test_the_minority_is_named() -> None:
    """The ranks in the minority are named, in any order of arrival."""
    sizes = {0: 8, 1: 4, 2: 4, 3: 2}
    diagnosis = refused(called(*(arrival(rank, size) for rank, size in sizes.items())))
    assert (diagnosis.slug, diagnosis.ranks) == ("world-size-mismatch", (0, 3))


@pytest.mark.parametrize("mixed", [{"torch": "2.13.1"}, {"torch": "2.13.0+cu128"}])
def test_a_patch_release_of_torch_is_no_mismatch(mixed: dict[str, Any]) -> None:
    """Only the first two numbers of torch's version must agree."""
    assert isinstance(decide(2.0, called(arrival(0, 2), arrival(1, 2, **mixed))), Completed)


def test_mixed_versions_allow_torch_to_differ_but_not_allhands() -> None:
    """ALLHANDS_MIXED_VERSIONS on every rank lets torch differ; allhands itself must still be the same."""
    ours = arrival(0, 2, mixed_versions=True)
    assert isinstance(decide(2.0, called(ours, arrival(1, 2, torch="2.11.0", mixed_versions=True))), Completed)
    diagnosis = refused(called(ours, arrival(1, 2, allhands="9.9", mixed_versions=True)))
    assert diagnosis.slug == "version-mismatch"
    assert "torch (any), allhands 9.9" in diagnosis.what


def test_mixed_versions_must_be_allowed_on_every_rank() -> None:
    """One rank that allows mixed versions is not enough."""
    state = called(arrival(0, 2, mixed_versions=True), arrival(1, 2, torch="2.11.0"))
    assert refused(state).slug == "version-mismatch"


def test_devices_of_one_kind_agree() -> None:
    """Each rank has its own GPU: only the kind of device must be equal."""
    state = called(arrival(0, 2, device="cuda:0"), arrival(1, 2, device="cuda:1"))
    assert isinstance(decide(2.0, state), Completed)


def test_one_gpu_for_two_ranks_is_refused_with_nccl() -> None:
    """NCCL cannot share a GPU, so such ranks are refused at once."""
    use: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl", "device": "cuda:0"}
    state = called(arrival(0, gpu="GPU-1", **use), arrival(1, gpu="GPU-2", **use), arrival(3, gpu="GPU-1", **use))
    diagnosis = refused(state)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("gpu-shared", (0, 3), ("node-a",))
    assert diagnosis.what == "ranks 0 and 3 use the same GPU (cuda:0 on node-a), which NCCL refuses"


def test_two_ranks_may_share_a_gpu_without_nccl() -> None:
    """Gloo accepts a shared GPU, and equal device numbers on two hosts are two GPUs."""
    assert isinstance(decide(2.0, called(arrival(0, 2, gpu="GPU-1"), arrival(1, 2, gpu="GPU-1"))), Completed)
    nccl = {"backend": "nccl", "gpu": "0", "device": "cuda:0"}
    assert isinstance(decide(2.0, called(arrival(0, 2, **nccl), arrival(1, 2, host="node-b", **nccl))), Completed)


def test_a_gpu_is_free_again_when_its_rank_left() -> None:
    """A rank that disconnected no longer uses its GPU."""
    nccl = {"backend": "nccl", "gpu": "GPU-1", "device": "cuda:0"}
    first = arrival(0, 2, **nccl)
    state = called(first)
    state.leave(first, 2.0)
    state.arrive(arrival(1, 2, **nccl))
    assert isinstance(decide(3.0, state), Waits)


# Refused at the deadline -----------------------------------------------------------------------------------------


def test_missing_ranks_at_the_earliest_deadline() -> None:
    """The first deadline of any rank present ends the roll call; all who are absent are named."""
    state = called(arrival(0, deadline=50.0), arrival(1, host="node-b", deadline=30.0), arrival(2, deadline=40.0))
    assert isinstance(decide(29.9, state), Waits)
    diagnosis = refused(state, now=30.0)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("missing-ranks", (3,), ())
    assert diagnosis.what == "3 of 4 ranks answered within 30 s"
    assert diagnosis.who == "ranks 0-2 (node-a and node-b) waited for rank 3"
    assert diagnosis.why == (
        "nothing was ever received from rank 3; ranks 0-2 reached node-a:29500 from 10.0.0.97 and 10.0.0.98"
    )


def test_the_deadline_of_a_rank_that_left_no_longer_counts() -> None:
    """After the rank with the earliest deadline left, the deadline is that of the others."""
    hasty = arrival(1, deadline=10.0)
    state = called(arrival(0, deadline=50.0), hasty)
    state.leave(hasty, 5.0)
    assert isinstance(decide(49.0, state), Waits)
    assert refused(state, now=50.0).ranks == (1, 2, 3)


def test_a_missing_rank_that_disconnected_is_reported_as_such() -> None:
    """The reason distinguishes missing ranks that disconnected from those that never connected."""
    gone = arrival(3, host="node-b", at=2.0)
    state = called(arrival(0), arrival(1), gone)
    state.leave(gone, 6.5)
    diagnosis = refused(state, now=DEADLINE)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("missing-ranks", (2, 3), ("node-b",))
    assert diagnosis.why.startswith(
        "rank 3 (node-b, pid 1003) connected and disconnected after 4.5 s; nothing was ever received from rank 2; "
    )


def test_a_rank_that_reconnected_is_not_missing() -> None:
    """A rank that is present is not reported as disconnected."""
    gone = arrival(1)
    state = called(arrival(0), gone)
    state.leave(gone, 2.0)
    state.arrive(arrival(1))
    diagnosis = refused(state, now=DEADLINE)
    assert (diagnosis.ranks, diagnosis.hosts) == ((2, 3), ())
    assert "disconnected" not in diagnosis.why


@pytest.mark.parametrize(("local", "said"), [(-1, True), (2, True), (4, False)])
def test_a_loopback_coordinator_is_named_where_ranks_may_be_elsewhere(local: int, *, said: bool) -> None:
    """Listening on loopback only is given as a reason unless every rank is known to be on this host."""
    state = called(arrival(0, local_world_size=local, node_rank=0))
    state.only_loopback = True
    assert ("listens on loopback only" in refused(state, now=DEADLINE).why) is said


def test_a_failed_proof_explains_a_missing_rank() -> None:
    """At the deadline, a missing rank whose number failed a proof is reported as not authorised."""
    state = called(arrival(0), arrival(1))
    state.refuse_proof(3, "10.0.0.66")
    assert isinstance(decide(2.0, state), Waits), "a stranger cannot end a roll call"
    diagnosis = refused(state, now=DEADLINE)
    assert (diagnosis.slug, diagnosis.ranks) == ("not-authorised", (3,))
    assert diagnosis.who == "rank 3 connected from 10.0.0.66"


def test_a_failed_proof_for_a_present_rank_changes_nothing() -> None:
    """A failed proof under the number of a rank that is present is ignored."""
    state = called(arrival(0), arrival(1))
    state.refuse_proof(1, "10.0.0.66")
    assert refused(state, now=DEADLINE).slug == "missing-ranks"
    state.arrive(arrival(2))
    state.arrive(arrival(3))
    assert isinstance(decide(DEADLINE, state), Completed)


def test_failed_proofs_cannot_fill_the_memory() -> None:
    """Failed proofs are remembered only for numbers that a rank can have."""
    state = called(arrival(0))
    for rank in (-1, -(2**62), 65_536, 2**62):
        state.refuse_proof(rank, "10.0.0.66")
    assert not state.unproven


# Late ------------------------------------------------------------------------------------------------------------


def test_a_second_process_of_a_rank_after_completion_is_a_duplicate() -> None:
    """A process that was started with the others and answers after completion is a duplicate."""
    state = called(arrival(0, 2), arrival(1, 2))
    diagnosis = late(arrival(1, 2, host="node-b", started=5.0), state, completed_wall=10.0, now=2.0)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("duplicate-rank", (1,), ("node-a", "node-b"))


def test_a_process_that_started_after_completion_belongs_to_another_job() -> None:
    """A process that did not exist when the group was formed belongs to another job at the same address."""
    state = called(arrival(0, 2), arrival(1, 2))
    diagnosis = late(arrival(1, 2, host="node-b", started=11.0), state, completed_wall=10.0, now=42.0)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("port-in-use", (1,), ("node-b",))
    assert diagnosis.what == "node-a:29500 belongs to another job, whose 2 ranks are complete"
    assert diagnosis.who == "rank 1 (node-b, pid 1001) met the job of rank 0 (node-a, pid 1000)"
    assert "42 s ago" in diagnosis.why


@pytest.mark.parametrize("rank", [1, 3])
def test_a_late_rank_with_another_world_size(rank: int) -> None:
    """A late process of the job with another world size is refused as the odd one."""
    state = called(arrival(0, 2), arrival(1, 2))
    diagnosis = late(arrival(rank, 4, host="node-b"), state, completed_wall=10.0, now=2.0)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("world-size-mismatch", (rank,), ("node-b",))


@pytest.mark.parametrize("odd", [{"job": "day"}, {"attempt": 3}])
def test_a_late_rank_of_another_job(odd: dict[str, Any]) -> None:
    """A late rank of another job is refused as such, whenever it was started."""
    state = called(arrival(0, 2), arrival(1, 2))
    newcomer = arrival(0, 2, host="node-b", started=99.0, **odd)
    diagnosis = late(newcomer, state, completed_wall=10.0, now=2.0)
    assert (diagnosis.slug, diagnosis.ranks, diagnosis.hosts) == ("job-mismatch", (0,), ("node-b",))


# Cost ------------------------------------------------------------------------------------------------------------


def test_the_cost_of_an_arrival_does_not_grow() -> None:
    """Deciding after each of 5,000 arrivals takes far less than it would if each decision looked at all ranks."""
    size = 5_000
    state = RollCall(OPENED)
    started = time.process_time()  # its own: others use the machine too
    for rank in range(size):
        assert isinstance(decide(1.0, state), Waits)
        state.arrive(arrival(rank, size, host=f"node-{rank // 8}"))
    assert isinstance(decide(1.0, state), Completed)
    # Looking at every rank each time is 12.5 million looks: more than ten times this.
    assert time.process_time() - started < 3.0


@pytest.mark.parametrize("derived_name", [True, False])
def test_the_fix_explains_a_derived_socket_name(derived_name: bool) -> None:
    """Without an address, a missing rank may have another parent process; the fix covers that."""
    state = called(arrival(0))
    state.derived_name = derived_name
    decision = decide(state.deadline, state)
    assert isinstance(decision, RefusedRoll)
    assert ("ALLHANDS_JOB" in decision.diagnosis.fix) is derived_name


# Nodes in the place of ranks ------------------------------------------------------------------------------------


def nodes(*arrivals: Arrival) -> RollCall:
    """Return a roll call of agents with these arrivals."""
    state = RollCall(OPENED, listening="node-a:29500", wording=NODES)
    for each in arrivals:
        state.arrive(msgspec.structs.replace(each, wording=NODES))
    return state


def test_nodes_are_called_nodes() -> None:
    """The agents' roll call has the ranks' slugs, and names nodes and the launcher's options."""
    state = nodes(arrival(0, 3))
    assert waiting(state) == "1 of 3 nodes are here; waiting for nodes 1 and 2 (2 s)"
    missing = refused(state, DEADLINE)
    assert (missing.slug, missing.ranks) == ("missing-ranks", (1, 2))
    assert missing.what == "1 of 3 nodes answered within 60 s"
    assert missing.who == "node 0 (node-a) waited for nodes 1 and 2"
    assert missing.fix.endswith("or raise --timeout")
    double = refused(nodes(arrival(0, 2), arrival(1, 2), arrival(1, 2, host="node-b")))
    assert (double.slug, double.what) == ("duplicate-rank", "two processes claim node 1 of 2")
    assert "its own node (--node-rank)" in double.fix
    sizes = refused(nodes(arrival(0, 2), arrival(1, 3, host="node-b")))
    assert sizes.what == "nodes disagree about the number of nodes: node 0 claims 2 and node 1 claims 3"
    assert (sizes.slug, sizes.fix) == ("world-size-mismatch", "start every node with the same --nnodes")
    assert sizes.who == "node 0 (node-a) and node 1 (node-b)"


def test_a_node_without_a_number() -> None:
    """An agent that was given no --node-rank is not called node -1."""
    assert (NODES.one(3), NODES.one(-1)) == ("node 3", "a node without a number")


def test_nodes_on_loopback_only() -> None:
    """The number of ranks that an agent starts does not show whether all nodes are on one host."""
    state = nodes(arrival(0, 2, local_world_size=2))
    state.only_loopback = True
    assert "nodes on other hosts cannot reach it" in refused(state, DEADLINE).why
