"""A group that cannot form says why: each cause is provoked, and every rank that runs must name it in time.

Each case fails once and then forms a group in the same processes at the same address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import leaks
from ranks.harness import Result, free_port, launch, running

pytestmark = pytest.mark.usefixtures("nursery")

# What ranks wait for each other where the cause shows only by waiting.
TIMEOUT_S = 3.0

# A cause that is certain is told within this, measured around init_process_group.
AT_ONCE_S = 3.0

# One deadline, honoured: never exceeded by more.
GRACE_S = 1.0

SCRIPT = """
import allhands as dist, json, os, torch
first, then = json.loads(os.environ["FIRST"]), json.loads(os.environ["THEN"])
exec(os.environ.get("BEFORE", ""))
gate("begin")
say(failed=attempt(dist.init_process_group, **first), initialised=dist.is_initialized())
exec(os.environ.get("BETWEEN", ""))
gate("again")
if then:
    say(again=attempt(dist.init_process_group, **then))
    x = torch.ones(1)
    dist.all_reduce(x)
    say(x=x.item())
    dist.destroy_process_group()
say(interface=os.environ.get("GLOO_SOCKET_IFNAME", ""))
"""


@dataclass(frozen=True)
class Case:
    """What each process passes to init_process_group, and what all of them must be told."""

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
import allhands.lifecycle as lifecycle
real = lifecycle.Claim
lifecycle.Claim = lambda **kw: real(**{**kw, "device": "cuda:0"})
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

# Where ranks meet. {} means nothing at all: by the process that started them.
PLACES = ["tcp", "file", "nothing"]


def place(kind: str, folder: Path) -> dict[str, str]:
    """Return the arguments that say where to meet."""
    match kind:
        case "tcp":
            return {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        case "file":
            return {"init_method": f"file://{folder}/meeting"}
        case _:
            return {}


def provoke(case: Case, where: Mapping[str, str]) -> list[Result]:
    """Run ``case`` and the retry after it."""
    count = len(case.first)
    special = {
        number: {
            "FIRST": json.dumps({"timeout": TIMEOUT_S, **where, **case.first[number]}),
            "THEN": json.dumps({"backend": "gloo", "rank": number, "world_size": count, "timeout": 15, **where}),
            "BEFORE": case.before.get(number, ""),
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
        # While it waits for long, one line says for whom.
        assert [line for line in result.stderr.splitlines() if not line.startswith("allhands rank ")] == []


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_why_the_group_cannot_form(name: str, tmp_path: Path) -> None:
    """Each cause reaches every rank with the same slug and ranks, in time, and a second attempt succeeds."""
    # The places take turns, so that each meets many causes; all of them with all would be minutes.
    kind = PLACES[list(CASES).index(name) % len(PLACES)]
    tell(name, kind, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_wherever_they_meet(name: str, kind: str, tmp_path: Path) -> None:
    """The same for every cause at every kind of meeting place."""
    if (name, kind) == ("duplicate rank 0", "file"):
        pytest.skip("the file tells the second rank 0 that it is in use; that has its own test")
    tell(name, kind, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACES)
def test_a_second_attempt_never_meets_the_first(kind: str, tmp_path: Path) -> None:
    """Twenty refused attempts, each followed by one at the same place: its coordinator is never in the way."""
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


def test_nccl_without_a_gpu_is_told_by_all() -> None:
    """Every rank that asks for nccl where there is none says so itself, at once."""
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


# Reaching the coordinator ----------------------------------------------------------------------------------------


def alone(first: Mapping[str, Any], **kw: Any) -> dict[str, Any]:
    """Return what one rank, alone, is told."""
    result = launch(SCRIPT, 1, {"FIRST": json.dumps(first), "THEN": "{}"}, **kw)[0]
    assert result.returncode == 0
    found: dict[str, Any] = result["failed"]
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", pytest.param("x" * 64, marks=pytest.mark.soak)])
def test_a_host_that_does_not_resolve(host: str, rank: int) -> None:
    """A name without an address, or that cannot be one, is told at once, by rank 0 and by the others."""
    found = alone({"init_method": f"tcp://{host}:29500", "rank": rank, "world_size": 2, "timeout": 20})
    if "temporary failure" in found["text"].lower():
        pytest.skip("the name server here does not answer, so nothing about names is certain")
    assert (found["slug"], found["kind"], found["hosts"]) == ("address-unresolvable", "ConnectError", [host])
    assert found["seconds"] < AT_ONCE_S


@pytest.mark.parametrize("kind", PLACES)
def test_rank_0_never_comes(kind: str, tmp_path: Path) -> None:
    """Where rank 0 is missing, the others say so at the deadline: refused at an address, missing elsewhere."""
    found = alone({"rank": 1, "world_size": 2, "timeout": 1.5, **place(kind, tmp_path)})
    expected = ("connection-refused", "ConnectError") if kind == "tcp" else ("missing-ranks", "RollCallTimeout")
    assert (found["slug"], found["kind"], found["ranks"]) == (*expected, [0])
    assert 1.0 < found["seconds"] < 1.5 + GRACE_S


SERVICES = {
    "http": """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""",
    "silent": """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(60)
""",
    "tcpstore": """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(60)
""",
}


@contextmanager
def service(name: str) -> Iterator[tuple[int, int]]:
    """Run something that is not allhands on a port; yield the port and its pid."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVICES[name], str(port)])
    try:
        deadline = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.02)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("name", "timeout"),
    [("http", 3), ("silent", 3), ("tcpstore", 3), pytest.param("silent", 13, marks=pytest.mark.soak)],
)
def test_something_else_has_the_port(name: str, timeout: int) -> None:
    """Rank 0 names who holds its port (pid and command); the others say that this is no coordinator, or is silent."""
    with service(name) as (port, pid):
        results = launch(
            f"""
import allhands as dist
where = "tcp://127.0.0.1:{port}"
say(failed=attempt(dist.init_process_group, "gloo", where, rank=rank, world_size=size, timeout={timeout}))
""",
            2,
        )
    root, other = (result["failed"] for result in results)
    assert (root["slug"], root["kind"], root["ranks"]) == ("port-in-use", "ConnectError", [0])
    assert f"pid {pid} of " in root["text"]
    assert "-c" in root["text"]
    assert root["seconds"] < AT_ONCE_S
    # Silence proves that it is no coordinator only after 10 s.
    slug = "wrong-service" if name == "http" or timeout > 10 else "coordinator-silent"
    assert (other["slug"], other["kind"], other["ranks"]) == (slug, "ConnectError", [0])
    assert f"127.0.0.1:{port}" in other["text"]
    if name == "http":
        assert other["certain"]
        assert other["seconds"] < AT_ONCE_S
        assert "it answered b'<!DOCTYPE HTML>" in other["text"]
    else:
        assert not other["certain"]
        assert other["seconds"] < timeout + GRACE_S


JOB = """
import allhands as dist, os, torch
dist.init_process_group("gloo", os.environ["WHERE"], rank=rank, world_size=size, timeout=15)
say(formed=dist.session.current().beside.pid if rank == 0 else 0)
x = torch.ones(1)
while x.item() < 1000 and not os.path.exists(os.environ["STOP"]):
    x.fill_(0 if not os.path.exists(os.environ["STOP"] + ".soon") else 1000)
    dist.all_reduce(x)
say(unharmed=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_another_job_of_ours_runs_there(kind: str, tmp_path: Path) -> None:
    """A second job at the address or file of a running one is told so on all its ranks; the first goes on unharmed."""
    where = place(kind, tmp_path)
    stop = tmp_path / "stop"
    with running(JOB, 2, {"WHERE": where["init_method"], "STOP": str(stop)}) as first:
        coordinator = first.wait_for("formed")[0]
        time.sleep(0.1)  # kernel start times are exact to 10 ms
        second = launch(
            """
import allhands as dist, os
say(failed=attempt(dist.init_process_group, "gloo", os.environ["WHERE"], rank=rank, world_size=size, timeout=3))
dist.destroy_process_group()
""",
            2,
            {"WHERE": where["init_method"]},
        )
        stop.with_suffix(".soon").touch()
        results = first.results()
    assert all(result["unharmed"] and (result.returncode, result.complaints) == (0, "") for result in results)
    if kind == "tcp":
        for result in second:
            assert result["failed"]["slug"] == "port-in-use", result["failed"]["text"]
            assert result["failed"]["kind"] == "ConnectError"
            assert result["failed"]["seconds"] < AT_ONCE_S
    else:
        # Once everyone has come the file is taken away, so a second job simply meets there.
        assert [result["failed"]["kind"] for result in second] == ["", ""]
    assert not leaks.alive(coordinator)


def test_a_double_that_comes_late_is_refused_and_the_group_unharmed() -> None:
    """A second process with a rank of a complete group is told duplicate-rank; the group does not notice."""
    results = launch(
        f"""
import allhands as dist, torch
where, number = "tcp://127.0.0.1:{free_port()}", rank % 2
if rank == 2:
    gate("formed")
    say(failed=attempt(dist.init_process_group, "gloo", where, rank=0, world_size=2, timeout=5))
    say(failed1=attempt(dist.init_process_group, "gloo", where, rank=1, world_size=2, timeout=5))
    say(failed3=attempt(dist.init_process_group, "gloo", where, rank=1, world_size=3, timeout=5))
    gate("refused")
else:
    dist.init_process_group("gloo", where, rank=rank, world_size=2, timeout=15)
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


def test_a_file_of_something_else_is_stale(tmp_path: Path) -> None:
    """What torch's FileStore left in the file is called stale by every rank at once, and stays untouched."""
    path = tmp_path / "meeting"
    results = launch(
        f"""
import allhands as dist, os
if rank == 0:
    store = dist.FileStore({str(path)!r}, -1)
    store.set("key", "value")
    say(size=os.path.getsize({str(path)!r}))
gate("written")
where = "file://{path}"
say(failed=attempt(dist.init_process_group, "gloo", where, rank=rank, world_size=size, timeout=5))
gate("told")
if rank == 0:
    say(after=os.path.getsize({str(path)!r}))
    os.unlink({str(path)!r})
gate("removed")
say(again=attempt(dist.init_process_group, "gloo", where, rank=rank, world_size=size, timeout=15))
dist.destroy_process_group()
say(left=os.path.exists({str(path)!r}))
""",
        2,
    )
    assert results[0]["size"] == results[0]["after"] > 0
    for result in results:
        found = result["failed"]
        assert (found["slug"], found["kind"], found["ranks"]) == ("stale-file", "ConnectError", [0])
        assert str(path) in found["text"]
        assert found["seconds"] < AT_ONCE_S
        assert result["again"]["kind"] == ""
    assert not path.exists()


def test_a_file_that_a_killed_job_left_is_replaced(tmp_path: Path) -> None:
    """The notice of a rank 0 that was killed in its roll call does not stand in the way of the next job."""
    path = tmp_path / "meeting"
    waiting = f"""
import allhands as dist
say(ready=True)
dist.init_process_group("gloo", "file://{path}", rank=0, world_size=2, timeout=20)
"""
    with running(waiting, 1) as job:
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mode & 0o777 == 0o600
        content = path.read_bytes()
        job.signal(0, signal.SIGKILL)
        job.results()
    path.write_bytes(content)  # as if the coordinator had been killed too
    results = launch(
        f"""
import allhands as dist
say(again=attempt(dist.init_process_group, "gloo", "file://{path}", rank=rank, world_size=size, timeout=10))
dist.destroy_process_group()
""",
        2,
    )
    assert [result["again"]["kind"] for result in results] == ["", ""], results[0]["again"]["text"]
    assert not path.exists()


def test_a_file_of_a_job_in_its_roll_call_is_in_use(tmp_path: Path) -> None:
    """A second rank 0 at the file of a job that is forming gets file-in-use with the coordinator's pid, at once."""
    where = f"file://{tmp_path}/meeting"
    results = launch(
        f"""
import allhands as dist, os, time
if rank == 1:
    while not os.path.exists("{tmp_path}/meeting"):
        time.sleep(0.01)
say(failed=attempt(dist.init_process_group, "gloo", "{where}", rank=0, world_size=2, timeout=1.5))
""",
        2,
    )
    found = results[1]["failed"]
    assert (found["slug"], found["kind"], found["ranks"]) == ("file-in-use", "ConnectError", [0])
    assert found["seconds"] < AT_ONCE_S
    assert results[0]["failed"]["slug"] == "missing-ranks"


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


# Time and death in the roll call ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", *(pytest.param(kind, marks=pytest.mark.soak) for kind in PLACES[1:])])
def test_a_late_rank_0_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Ranks that come two seconds before rank 0 form the group with it."""
    results = launch(
        f"""
import allhands as dist, time
if rank == 0:
    time.sleep(1.5)
say(formed=attempt(dist.init_process_group, "gloo", rank=rank, world_size=size, timeout=15, **{place(kind, tmp_path)}))
dist.destroy_process_group()
""",
        2,
    )
    assert [result["formed"]["kind"] for result in results] == ["", ""]
    assert results[1]["formed"]["seconds"] > 1.3
    assert "waiting for" in results[1].stderr


WAITING = """
import allhands as dist, os
say(ready=True)
say(failed=attempt(dist.init_process_group, "gloo", os.environ["WHERE"] or None, rank=rank, world_size=3, timeout=3))
"""


def connected(pid: int, port: int) -> None:
    """Wait until ``pid`` has a connection to ``port``."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if any(entry.raddr and entry.raddr.port == port for entry in psutil.Process(pid).net_connections("tcp")):
            return
        time.sleep(0.01)
    raise AssertionError("no connection")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_roll_call_is_named(victim: int) -> None:
    """Rank 0's death in the roll call is told at once; another rank's when time is up, as one that came and went."""
    port = free_port()
    with running(WAITING, 2, {"WHERE": f"tcp://127.0.0.1:{port}"}) as job:
        job.wait_for("ready")
        connected(job.ranks[1].pid, port)
        time.sleep(0.3)
        killed = job.signal(victim, signal.SIGKILL)
        result = job.results()[1 - victim]
    found = result["failed"]
    if victim == 0:
        assert (found["slug"], found["ranks"]) == ("peer-lost", [0])
        assert found["over"] - killed < 1.0
    else:
        assert (found["slug"], found["ranks"]) == ("missing-ranks", [1, 2])
        assert "came and went away" in found["text"]
        assert found["seconds"] < 3 + GRACE_S


def test_ctrl_c_in_the_roll_call_ends_promptly() -> None:
    """SIGINT to all processes while they wait for a missing rank raises KeyboardInterrupt and leaves nothing."""
    with running(WAITING, 2, {"WHERE": ""}) as job:
        job.wait_for("ready")
        time.sleep(0.7)
        sent = time.monotonic()
        # To both at once: one that hears of the other's end before its own signal comes has its answer.
        for each in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for entry in job.ranks:
                os.killpg(entry.pid, each)
        results = job.results()
    assert time.monotonic() - sent < 2.0
    for result in results:
        assert result.returncode in {-signal.SIGINT, 1}
        assert "KeyboardInterrupt" in result.stderr
        assert not any("failed" in line for line in result.lines)


def test_a_thread_may_not_hold_up_the_roll_call() -> None:
    """Two threads of one process cannot both form the default group: the second is told that there is one."""
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
