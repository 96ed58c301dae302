"""Ranks in containers: processes, mounts, /dev/shm and host name of their own, on the network of their machine."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from ranks.harness import free_port, launch

pytestmark = pytest.mark.hosts

# As a container engine does, with its default of 64 MiB of shared memory.
SETTLE = 'hostname pod-$RANKNO && mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
CONTAINER = ["unshare", "--pid", "--fork", "--mount", "--ipc", "--uts", "--mount-proc", "--kill-child", "sh", "-c"]


def unshared() -> bool:
    """Tell whether this machine lets these tests have containers."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*CONTAINER, SETTLE, "sh", "true"], env={"RANKNO": "0"}, capture_output=True, check=False)
    return done.returncode == 0


def test_containers_that_share_a_network_share_memory() -> None:
    """Each rank is pid 1 of its container. All sizes arrive, from the right processes; a death is an error."""
    if not unshared():
        pytest.skip("no pid, mount, ipc and uts namespaces can be made here")
    source = f"""
    import os, time
    import torch
    import allhands as dist

    assert os.getpid() == 1
    dist.init_process_group("allhands", "tcp://127.0.0.1:{free_port()}", 30, size, rank)
    assert dist.group.WORLD.engine.name == "shm"
    for count in (1, 1 << 14, 1 << 18, 1 << 22):
        mine = torch.full((count,), float(rank + 1))
        got = [torch.empty(count) for _ in range(size)]
        dist.all_gather(got, mine)
        assert all((each == number + 1).all() for number, each in enumerate(got)), count
        dist.all_to_all(got, [torch.full((count,), float(10 * rank + each)) for each in range(size)])
        assert all((each == 10 * number + rank).all() for number, each in enumerate(got)), count
        other = torch.empty(count)
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(other, 0)
            assert (other == 1).all(), count
        dist.all_reduce(mine)
        assert (mine == 3).all(), count
    dist.barrier()
    if rank == 1:
        os._exit(9)
    begun = time.monotonic()
    failed = attempt(dist.all_reduce, mine)
    say(failed=failed, seconds=time.monotonic() - begun)
    """
    survivor, victim = launch(source, 2, command=[*CONTAINER, SETTLE, "sh", sys.executable])
    assert victim.returncode == 9, victim.stderr
    assert survivor.returncode == 0, survivor.stderr
    assert survivor["failed"]["slug"] == "peer-lost"
    assert "rank 1 (pod-1, pid 1)" in survivor["failed"]["text"]
    assert survivor["seconds"] < 10  # far below the timeout
