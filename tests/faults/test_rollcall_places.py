"""A group that cannot form where its ranks meet: a name without an address, a port or a file that is another's."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import leaks
from faults.rollcalls import AT_ONCE_S, GRACE_S, JOB, alone, place, service
from ranks.harness import launch, running

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", pytest.param("x" * 64, marks=pytest.mark.soak)])
def test_a_host_that_does_not_resolve(host: str, rank: int) -> None:
    """A name without an address, or that cannot be one, is an error at once, on rank 0 and on the others."""
    found = alone({"init_method": f"tcp://{host}:29500", "rank": rank, "world_size": 2, "timeout": 20})
    if "temporary failure" in found["text"].lower():
        pytest.skip("the name server here does not answer, so nothing about names is certain")
    assert (found["slug"], found["kind"], found["hosts"]) == ("address-unresolvable", "ConnectError", [host])
    assert found["seconds"] < AT_ONCE_S


@pytest.mark.parametrize(
    ("name", "timeout"),
    [
        ("http", 20),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("silent", 3), ("tcpstore", 3), ("silent", 13)]),
    ],
)
def test_something_else_has_the_port(name: str, timeout: int) -> None:
    """Rank 0 names the owner of its port (pid and command); the others raise wrong-service or coordinator-silent."""
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


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_another_job_of_ours_runs_there(kind: str, tmp_path: Path) -> None:
    """A second job at the address or file of a running one fails on all its ranks; the first is not affected."""
    where = place(kind, tmp_path)
    stop = tmp_path / "stop"
    with running(JOB, 2, {"WHERE": where["init_method"], "STOP": str(stop)}) as first:
        coordinator = first.wait_for("formed")[0]
        time.sleep(0.1)  # kernel start times are exact to 10 ms
        second = launch(
            """
import allhands as dist, os
say(failed=attempt(dist.init_process_group, "gloo", os.environ["WHERE"], rank=rank, world_size=size, timeout=20))
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
        # The file is removed once all ranks have arrived, so a second job can use it.
        assert [result["failed"]["kind"] for result in second] == ["", ""]
    assert not leaks.alive(coordinator)


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


def test_a_file_of_a_killed_job_is_replaced(tmp_path: Path) -> None:
    """The file of a rank 0 that was killed in its roll call does not block the next job."""
    path = tmp_path / "meeting"
    waiting = f"""
import allhands as dist
say(ready=True)
dist.init_process_group("gloo", "file://{path}", rank=0, world_size=2, timeout=20)
"""
    with running(waiting, 1) as job:
        deadline = time.monotonic() + 30
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
say(failed=attempt(dist.init_process_group, "gloo", "{where}", rank=0, world_size=2, timeout=5))
""",
        2,
    )
    found = results[1]["failed"]
    assert (found["slug"], found["kind"], found["ranks"]) == ("file-in-use", "ConnectError", [0])
    assert found["seconds"] < AT_ONCE_S
    assert results[0]["failed"]["slug"] == "missing-ranks"
