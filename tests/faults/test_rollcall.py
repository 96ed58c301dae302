"""A group that cannot form: every running rank must report the missing, duplicate or different ranks in time.

Each case fails once and then forms a group in the same processes at the same address.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faults.rollcalls import AT_ONCE_S, GRACE_S, PATIENT_S, PLACES, SCRIPT, TIMEOUT_S, alone, place
from ranks.harness import Result, free_port, launch

pytestmark = pytest.mark.usefixtures("fork_server")


@dataclass(frozen=True)
class Case:
    """The arguments of each process for init_process_group, and the diagnosis that all of them must get."""

    first: list[dict[str, Any]]
    slug: str
    ranks: list[int]
    error: str
    at_once: bool = True
    before: Mapping[int, str] = field(default_factory=dict)
    between: Mapping[int, str] = field(default_factory=dict)
    says: str = ""


def each(count: int, **same: Any) -> list[dict[str, Any]]:
    """Return the arguments of ``count`` ranks that do everything right, but for ``same``."""
    return [{"backend": "gloo", "rank": number, "world_size": count, **same} for number in range(count)]


def changed(arguments: list[dict[str, Any]], which: int, **other: Any) -> list[dict[str, Any]]:
    """Return ``arguments`` with those of one rank changed."""
    return [{**entry, **other} if number == which else entry for number, entry in enumerate(arguments)]


FAKE_DEVICE = """
import allhands.groups.lifecycle as lifecycle
real = lifecycle.Claim
lifecycle.Claim = lambda **kw: real(**{**kw, "device": "cuda:0"})
"""

# A rank with trouble of its own gives rank 0 two seconds to open the roll call and hear of it; a machine that does much
# else may take longer to start a coordinator.
PATIENCE = f"""
from allhands.control import join as roll
roll._TROUBLE_S = {PATIENT_S}
"""

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
"""

CASES = {
    "missing rank": Case(each(3)[:2], "missing-ranks", [2], "RollCallTimeout", at_once=False),
    "duplicate rank": Case(changed(each(3), 2, rank=1), "duplicate-rank", [1], "RollCallRefused"),
    "duplicate rank 0": Case(changed(each(3), 2, rank=0), "duplicate-rank", [0], "RollCallRefused"),
    "rank beyond size": Case(changed(each(2), 1, rank=5), "rank-out-of-range", [5], "WorldError"),
    "world sizes differ": Case(changed(each(2), 1, world_size=3), "world-size-mismatch", [1], "RollCallRefused"),
    "backends differ": Case(changed(each(2), 1, backend="allhands"), "backend-mismatch", [1], "RollCallRefused"),
    "torch differs": Case(
        each(2),
        "version-mismatch",
        [1],
        "RollCallRefused",
        before={1: "real = torch.__version__; torch.__version__ = '1.2.3'"},
        between={1: "torch.__version__ = real"},
        says="rank 1 has torch 1.2",
    ),
    "devices differ": Case(
        each(2),
        "device-mismatch",
        [1],
        "RollCallRefused",
        before={0: FAKE_DEVICE.replace("cuda", "xpu"), 1: FAKE_DEVICE},
        between={0: "lifecycle.Claim = real", 1: "lifecycle.Claim = real"},
        says="cuda",
    ),
    # Wherever this runs: with an MPI or without.
    "mpi": Case(
        changed(each(2), 1, backend="mpi"),
        "mpi-missing",
        [1],
        "EngineMissing",
        before={1: "import os; os.environ['MPI4PY_LIBMPI'] = '/nonexistent/libmpi.so'"},
    ),
    "backend misspelt": Case(
        changed(each(2), 1, backend="glooo"), "backend-unknown", [1], "EngineMissing", says="did you mean 'gloo'?"
    ),
    "few descriptors": Case(
        each(2, world_size=300),
        "fd-limit",
        [1],
        "ResourceError",
        before={1: FEW_DESCRIPTORS},
        says="300 ranks need",
    ),
    "no such interface": Case(
        each(2),
        "interface-mismatch",
        [1],
        "ConnectError",
        before={1: "os.environ['GLOO_SOCKET_IFNAME'] = 'nosuch0'"},
        between={1: "del os.environ['GLOO_SOCKET_IFNAME']"},
        says="nosuch0",
    ),
    "token differs": Case(
        each(2),
        "not-authorised",
        [1],
        "ConnectError",
        at_once=False,
        before={1: "os.environ['ALLHANDS_TOKEN'] = 'wrong'"},
        between={1: "os.environ['ALLHANDS_TOKEN'] = 'right'"},
    ),
}


def provoke(case: Case, where: Mapping[str, str]) -> list[Result]:
    """Run ``case`` and the retry after it."""
    count = len(case.first)
    special = {
        number: {
            "FIRST": json.dumps({"timeout": PATIENT_S if case.at_once else TIMEOUT_S, **where, **case.first[number]}),
            "THEN": json.dumps({"backend": "gloo", "rank": number, "world_size": count, "timeout": PATIENT_S, **where}),
            "BEFORE": PATIENCE + case.before.get(number, ""),
            "BETWEEN": case.between.get(number, ""),
            "ALLHANDS_TOKEN": "right" if case.slug == "not-authorised" else "",
        }
        for number in range(count)
    }
    return launch(SCRIPT, count, each=special)


def formed_again(results: list[Result]) -> None:
    """Assert that the second attempt worked everywhere and left nothing."""
    for result in results:
        assert not result["initialised"]
        assert result["again"]["kind"] == "", result["again"]["text"]
        assert result["x"] == len(results)
        assert result["interface"] == ""
        assert result.returncode == 0
        # A long wait prints one line with the ranks that it waits for.
        assert [line for line in result.stderr.splitlines() if not line.startswith("allhands rank ")] == []


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_reason_why_the_group_cannot_form(name: str, tmp_path: Path) -> None:
    """Each cause reaches every rank with the same slug and ranks, in time, and a second attempt succeeds."""
    # The places take turns, so that each meets many causes; all of them with all would be minutes.
    kind = PLACES[list(CASES).index(name) % len(PLACES)]
    tell(name, kind, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_reason_with_every_rendezvous(name: str, kind: str, tmp_path: Path) -> None:
    """The same for every cause at every kind of meeting place."""
    if (name, kind) == ("duplicate rank 0", "file"):
        pytest.skip("the file tells the second rank 0 that it is in use; that has its own test")
    tell(name, kind, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACES)
def test_a_second_attempt_never_meets_the_first(kind: str, tmp_path: Path) -> None:
    """Twenty refused attempts, each followed by one at the same address: its coordinator never blocks the next."""
    for _ in range(20):
        formed_again(provoke(CASES["backends differ"], place(kind, tmp_path)))


def tell(name: str, kind: str, folder: Path) -> None:
    """Provoke one case at one kind of place and check all that was promised."""
    case = CASES[name]
    results = provoke(case, place(kind, folder))
    for result in results:
        found = result["failed"]
        assert (found.get("slug"), found["ranks"], found["kind"]) == (case.slug, case.ranks, case.error), found["text"]
        assert case.says in found["text"]
        assert found["seconds"] < (AT_ONCE_S if case.at_once else TIMEOUT_S + GRACE_S)
        assert "DistError" in found["bases"]
    formed_again(results)


def test_nccl_without_a_gpu_is_an_error_on_all_ranks() -> None:
    """Every rank that requests nccl without NCCL raises the error itself, at once."""
    where = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
    slugs = {"nccl-missing", "gpu-missing"}  # the first where torch was built without NCCL
    results = provoke(Case(each(2, backend="nccl"), "nccl-missing", [], "EngineMissing"), where)
    for result in results:
        found = result["failed"]
        assert found.get("slug") in slugs
        assert found["kind"] == "EngineMissing"
        assert len(found["ranks"]) == 1
        assert found["seconds"] < AT_ONCE_S
    formed_again(results)


def test_a_late_duplicate_is_refused_and_the_group_unharmed() -> None:
    """A second process with a rank of a complete group gets duplicate-rank; the group is not affected."""
    results = launch(
        f"""
import allhands as dist, torch
where, number = "tcp://127.0.0.1:{free_port()}", rank % 2
if rank == 2:
    gate("formed")
    say(failed=attempt(dist.init_process_group, "gloo", where, rank=0, world_size=2, timeout={PATIENT_S}))
    say(failed1=attempt(dist.init_process_group, "gloo", where, rank=1, world_size=2, timeout={PATIENT_S}))
    say(failed3=attempt(dist.init_process_group, "gloo", where, rank=1, world_size=3, timeout={PATIENT_S}))
    gate("refused")
else:
    dist.init_process_group("gloo", where, rank=rank, world_size=2, timeout={PATIENT_S})
    gate("formed")
    gate("refused")
    x = torch.ones(1)
    dist.all_reduce(x)
    say(x=x.item())
    dist.destroy_process_group()
""",
        3,
    )
    double = results[2]
    assert (double["failed"]["slug"], double["failed"]["ranks"]) == ("duplicate-rank", [0]), double["failed"]["text"]
    assert (double["failed1"]["slug"], double["failed1"]["ranks"]) == ("duplicate-rank", [1])
    assert double["failed3"]["slug"] == "world-size-mismatch"
    assert all(double[key]["seconds"] < AT_ONCE_S for key in ("failed", "failed1", "failed3"))
    assert [results[number]["x"] for number in (0, 1)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, "the rank and the world size"),
    ],
)
def test_an_incomplete_environment_names_what_is_missing(env: dict[str, str], missing: str) -> None:
    """Half a set of torch's variables is an error at once that names the other half."""
    found = alone({"timeout": 5}, each={0: env})
    assert (found["slug"], found["kind"]) == ("incomplete-environment", "WorldError")
    assert found["text"].startswith(missing)
    assert found["seconds"] < AT_ONCE_S


def test_a_thread_may_not_hold_up_the_roll_call() -> None:
    """Two threads of one process cannot both form the default group: the second gets already-initialised."""
    result = launch(
        """
import allhands as dist, threading
dist.init_process_group("gloo", rank=0, world_size=1)
found = []
thread = threading.Thread(target=lambda: found.append(attempt(dist.init_process_group, "gloo", rank=0, world_size=1)))
thread.start()
thread.join()
say(failed=found[0])
""",
        1,
    )[0]
    assert (result["failed"]["slug"], result["failed"]["kind"]) == ("already-initialised", "AlreadyInitialised")
    assert "script.py:3" in result["failed"]["text"]
