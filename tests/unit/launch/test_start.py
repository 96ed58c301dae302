"""The imports before the workers start, and the workers' environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.launch.options import Job
from allhands.launch.start import reserve_port, worker_environment


def test_no_slow_imports_before_the_workers() -> None:
    """The imports before the first worker starts leave out every slow module."""
    code = "import sys, allhands.__main__, allhands.launch.start; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    slow = {
        "asyncio",
        "click",
        "dataclasses",
        "json",
        "logging",
        "msgspec",
        "pathlib",
        "psutil",
        "rich",
        "ssl",
        "torch",
    }
    assert slow & set(done.stdout.split()) == set()


def test_reserved_port() -> None:
    """A reserved port is given to no other socket, and a socket with SO_REUSEADDR can still listen there."""
    with reserve_port("127.0.0.1") as reserved, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(reserved.getsockname())
        other.listen()
        with socket.create_connection(reserved.getsockname(), timeout=5):
            pass


def found(job: Job, local_rank: int, environment: dict[str, str]) -> dict[str, str]:
    """Return a worker's environment."""
    return worker_environment(
        job, local_rank, 2, coordinator="unix:allhands-7", token="t", master=Address("h", 1), environment=environment
    )


def test_omp_num_threads() -> None:
    """Several ranks get one thread each, as with torchrun, unless the user sets it; one rank gets all."""
    two, one = Job("a.py", local_world_size=2), Job("a.py")
    assert found(two, 0, {})["OMP_NUM_THREADS"] == "1"
    assert found(two, 0, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in found(one, 0, {})


def test_variables_of_an_outer_launcher() -> None:
    """Variables of another launcher are replaced or removed; all others are inherited."""
    outer = {"RANK": "9", "TORCHELASTIC_USE_AGENT_STORE": "True", "ALLHANDS_RECORDER_FD": "3:1", "HOME": "/root"}
    made = found(Job("a.py", local_world_size=2), 1, outer)
    assert (made["RANK"], made["HOME"]) == ("1", "/root")
    assert not {"TORCHELASTIC_USE_AGENT_STORE", "ALLHANDS_RECORDER_FD"} & set(made)


def test_detection_reads_the_environment() -> None:
    """A rank of the second node detects its rank, and this launcher wins over Slurm's variables."""
    job = Job("a.py", name="night", local_world_size=2, nodes=2, node_rank=1)
    world = identify(found(job, 1, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}))
    assert (world.rank, world.world_size, world.local_rank, world.node_rank) == (3, 4, 1, 1)
    assert (world.job, world.source, world.socket) == ("night-2", "allhands", "allhands-7")
