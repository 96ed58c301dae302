from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.environments.identify import identify
from allhands.environments.slurm import MOST, counts, expand, split
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

STEP = {
    "SLURM_STEP_NODELIST": "node[02-03],gpu-a",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "4",
}

# What `srun --nodes=2 --ntasks=4` of Slurm 22.05 gave its four tasks, less what nobody could read a rank from (user,
# folder, ports of srun's own). tests/soak/test_slurm.py asks a real srun for the same.
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "3,1",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
}
# What differs between them.
TASKS = [
    {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "3"},
]
# What the script of `sbatch --nodes=2 --ntasks=4` sees itself, and the shell of such a salloc.
BATCH = {name: value for name, value in SRUN.items() if not name.startswith(("SLURM_STEP", "SLURM_LAUNCH"))} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
SALLOC = {name: value for name, value in BATCH.items() if name not in {*TASKS[0]}}


@pytest.mark.parametrize("rank", range(4))
def test_tasks_of_a_real_srun(rank: int) -> None:
    """The four tasks of a real srun, three on one node and one on the other."""
    world = identify({**SRUN, **TASKS[rank]})
    assert (world.rank, world.world_size, world.source, world.job) == (rank, 4, "slurm", "slurm-1.0")
    place = (0, 1, 1) if rank == 3 else (rank, 3, 0)
    assert (world.local_rank, world.local_world_size, world.node_rank) == place
    assert world.coordinator is not None
    assert world.coordinator.host == "node1"


@pytest.mark.parametrize("env", [BATCH, SALLOC])
def test_batch_script_is_no_rank(refuse: Refuse, env: dict[str, str]) -> None:
    """The script of sbatch looks like rank 0 and is none: the fix is srun."""
    assert "srun" in refuse("not-launched", env).diagnosis.fix


def test_values() -> None:
    """A task's numbers are those of the step, not of the job."""
    world = identify(STEP)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (3, 5, 1, 2, 1)
    assert (world.job, world.source) == ("slurm-77.4", "slurm")
    assert world.reasons["world_size"] == "SLURM_STEP_NUM_TASKS=5"


def test_size_of_the_job_if_the_step_gives_none() -> None:
    """SLURM_NTASKS is the size where SLURM_STEP_NUM_TASKS is not set."""
    assert identify({**STEP, "SLURM_STEP_NUM_TASKS": ""}).world_size == 9


def test_host_is_the_steps_first() -> None:
    """Rank 0 is on the first host of the step: neither where srun was typed nor the first of the job."""
    other = {"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9", "SLURM_JOB_NODELIST": "node[01-03],gpu-a"}
    world = identify({**STEP, **other})
    assert world.coordinator is not None
    assert world.coordinator.host == "node02"


def test_arbitrary_distribution_follows_the_host_file(tmp_path: Path) -> None:
    """With --distribution=arbitrary rank 0 is on the first host of SLURM_HOSTFILE; otherwise the file is not read."""
    listed = tmp_path / "hosts"
    listed.write_text("gpu-a\nnode02\nnode03\n")
    world = identify({**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(listed)})
    assert world.coordinator is not None
    assert world.coordinator.host == "gpu-a"
    world = identify({**STEP, "SLURM_DISTRIBUTION": "block", "SLURM_HOSTFILE": str(listed)})
    assert world.coordinator is not None
    assert world.coordinator.host == "node02"


def test_arbitrary_distribution_without_a_list() -> None:
    """After `srun -m arbitrary -w n2,n1` no variable gives the host of rank 0, and none is guessed."""
    world = identify({**STEP, "SLURM_DISTRIBUTION": "arbitrary"})
    assert world.coordinator is None
    assert "MASTER_ADDR" in world.reasons["coordinator"]


def test_host_file_that_cannot_be_read(refuse: Refuse) -> None:
    """A host file that is not on this node is named."""
    env = {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/nowhere/hosts"}
    assert "SLURM_HOSTFILE=/nowhere/hosts" in refuse("incomplete-environment", env).diagnosis.what


def test_derived_port_differs_between_steps() -> None:
    """The port is stable for a step, differs for concurrent steps, stays in its range, and has a reason."""
    ports = set()
    for step in range(8):
        env = {**STEP, "SLURM_STEP_ID": str(step)}
        world = identify(env)
        assert world.coordinator is not None
        assert world.coordinator == identify({**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).coordinator
        assert 20000 <= world.coordinator.port < 30000
        assert "derived" in world.reasons["coordinator"]
        ports.add(world.coordinator.port)
    assert len(ports) == 8


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({"SLURM_STEP_RESV_PORTS": "12010-12013"}, Address("node02", 12010)),
        ({"SLURM_STEP_RESV_PORTS": "12015,12013"}, Address("node02", 12015)),
        ({"SLURM_STEP_RESV_PORTS": "12010-12013", "MASTER_PORT": "1234"}, Address("node02", 1234)),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1234"}, Address("h", 1234)),
    ],
)
def test_ports(extra: dict[str, str], address: Address) -> None:
    """A port of the user has precedence, then one that Slurm reserved."""
    assert identify({**STEP, **extra}).coordinator == address


def test_one_host_needs_no_address() -> None:
    """All tasks on one node: no coordinator's address, unless the user gives one."""
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node02"}
    world = identify(env)
    assert (world.coordinator, world.one_host) == (None, True)
    world = identify({**env, "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NUM_NODES": "1"})
    assert (world.coordinator, world.local_world_size) == (None, 5)
    assert identify({**env, "MASTER_ADDR": "h", "MASTER_PORT": "1"}).coordinator == Address("h", 1)


def test_local_world_size_is_slurms() -> None:
    """LOCAL_WORLD_SIZE of another source is not used."""
    assert identify({**STEP, "LOCAL_WORLD_SIZE": "5"}).local_world_size == 2
    assert identify({**STEP, "LOCAL_WORLD_SIZE": "5", "SLURM_STEP_TASKS_PER_NODE": ""}).local_world_size is None


def test_strange_node_list(refuse: Refuse) -> None:
    """A node list that was cut off is shown."""
    assert "n[1-" in refuse("invalid-argument", {**STEP, "SLURM_STEP_NODELIST": "n[1-"}).diagnosis.what


def test_pmi2_of_slurm() -> None:
    """Slurm's pmi2 sets PMI_RANK as well: the process is still Slurm's."""
    assert identify({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).source == "slurm"


Bracket = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("node[01-04,07],gpu-a", ["node01", "node02", "node03", "node04", "node07", "gpu-a"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("n[1-2]-ib,x[3-4]", ["n1-ib", "n2-ib", "x3", "x4"]),
        ("host[5],b[1-2]", ["host5", "b1", "b2"]),
        ("prefix[0-2,12]", ["prefix0", "prefix1", "prefix2", "prefix12"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a b\tc\nd,e, f", ["a", "b", "c", "d", "e", "f"]),
        ("a,a", ["a", "a"]),
        ("[1-2]", ["1", "2"]),
        ("", []),
    ],
)
def test_examples(written: str, hosts: list[str]) -> None:
    """Lists as Slurm writes them, several brackets and suffixes included."""
    assert expand(written) == hosts


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("n[1-", "not closed"),
        ("n[3-1]", "backwards"),
        ("n[a-b]", "'a-b'"),
        ("n[]", "''"),
        ("n[1,]", "''"),
        ("n[1-2-3]", "'1-2-3'"),
        ("n]1[", "not open"),
        ("n[[1]]", "opened twice"),
        ("n[-1]", "'-1'"),
        ("n[¹]", "'¹'"),
    ],
)
def test_malformed(written: str, why: str) -> None:
    """A malformed host list is an error that shows it, with the reason."""
    with pytest.raises(AllhandsError) as caught:
        expand(written)
    assert caught.value.slug == "invalid-argument"
    assert written in caught.value.diagnosis.what
    assert why in caught.value.diagnosis.why


@pytest.mark.parametrize("written", ["n[0-99999999999]", "a[0-999]b[0-999]", "n[0-65535],m", "n[0-40000,0-40000]"])
def test_too_many(written: str) -> None:
    """A list that would exhaust the memory is refused."""
    with pytest.raises(AllhandsError, match=str(MOST)):
        expand(written)
    assert len(expand("n[0-65535]")) == MOST


names = st.text("abcz09.-_", max_size=4)
brackets = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(0, 4)).map(lambda t: (t[0], t[0] + t[1], t[2])),
    min_size=1,
    max_size=3,
)
# A host expression: text and brackets in turn, beginning with text so that it is never empty.
items = st.tuples(st.sampled_from(["n", "gpu-", "0"]), st.lists(st.tuples(brackets, names), max_size=3))


def write(item: tuple[str, list[tuple[Bracket, str]]]) -> str:
    """Write a host expression as Slurm does."""
    first, rest = item
    text = first
    for bracket, name in rest:
        parts = [f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high}" for low, high, width in bracket]
        text += f"[{','.join(parts)}]{name}"
    return text


def reference(item: tuple[str, list[tuple[Bracket, str]]]) -> list[str]:
    """Expand a host expression from its parts, by recursion from the right."""
    first, rest = item
    if not rest:
        return [first]
    (bracket, name), *others = rest
    tails = reference((name, others))
    numbers = [f"{number:0{width}d}" for low, high, width in bracket for number in range(low, high + 1)]
    return [f"{first}{number}{tail}" for number, tail in itertools.product(numbers, tails)]


@given(st.lists(items, max_size=3), st.sampled_from([",", " ", ", ", "\n"]))
def test_round_trip(listed: list[tuple[str, list[tuple[Bracket, str]]]], separator: str) -> None:
    """Any list expands to the hosts of its parts, in order, with any separator."""
    written = [write(item) for item in listed]
    expected = [reference(item) for item in listed]
    if sum(map(len, expected)) > MOST:
        return
    assert split(separator.join(written)) == written
    assert expand(separator.join(written)) == [host for hosts in expected for host in hosts]


@given(st.text("n[]-,0123 x", max_size=12))
def test_any_text(written: str) -> None:
    """Any text gives hosts without brackets, or the one error; never anything else."""
    try:
        hosts = expand(written)
    except AllhandsError as error:
        assert error.slug == "invalid-argument"  # noqa: PT017  # hypothesis gives both kinds of text
    else:
        assert not any(letter in host for host in hosts for letter in "[], ")


@pytest.mark.parametrize(
    ("written", "numbers"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2]), ("3(x2), 1(x2)", [3, 3, 1, 1])]
)
def test_counts(written: str, numbers: list[int]) -> None:
    """Tasks per node, as Slurm shortens them."""
    assert counts(written) == numbers


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_round_trip(runs: list[tuple[int, int]]) -> None:
    """Any run lengths expand to themselves."""
    written = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)
    assert counts(written) == [number for number, times in runs for _ in range(times)]


@pytest.mark.parametrize("written", ["2(x", "x", "2(3)", "", "2,,1", "1(x99999999999)"])
def test_malformed_counts(written: str) -> None:
    """A malformed list of counts is an error, also one that would exhaust the memory."""
    with pytest.raises(AllhandsError) as caught:
        counts(written)
    assert caught.value.slug == "invalid-argument"
