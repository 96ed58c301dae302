"""Agents of `allhands run` on several hosts, which are network namespaces, and scripts for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hosts.conftest import Network
from ranks.runner import Ran, Running, running

__all__ = ["ENTERING", "PORT", "TRAINS", "WAITS", "agents", "pids", "results"]

ENTERING = (sys.executable, str(Path(__file__).with_name("command.py")))

PORT = 29500

# No torch and no group: for tests of the agents alone.
WAITS = """
import os, sys, time
print("here", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["ALLHANDS_RESTART"], flush=True)
time.sleep(600)
"""

TRAINS = """
import os, socket
import torch
import allhands as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
truth = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
first = last = 0.0
for step in range(40):
    x = torch.randn(32, 4)
    loss = torch.nn.functional.mse_loss(model(x), x @ truth)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    first, last = first or loss.item(), loss.item()
weights = [parameter.detach().clone() for parameter in model.parameters()]
others = [torch.empty_like(weights[0]) for _ in range(dist.get_world_size())]
dist.all_gather(others, weights[0])
assert all(torch.equal(other, weights[0]) for other in others)
assert last < first / 10, (first, last)
print("trained", dist.get_rank(), dist.get_world_size(), socket.gethostname(), flush=True)
dist.destroy_process_group()
"""


@contextmanager
def agents(
    made: Network,
    source: str,
    *options: str,
    port: int = PORT,
    each: Mapping[int, tuple[str, ...]] | None = None,
    env: Mapping[int, Mapping[str, str]] | None = None,
    on: tuple[int, ...] = (0, 1),
    nodes: int = 0,
    ranks: tuple[int, ...] = (2, 2),
) -> Iterator[list[Running]]:
    """Start an agent on each of the hosts ``on``; ``each`` has options in place of --node-rank."""
    with ExitStack() as stack:
        jobs = []
        for node, place in enumerate(on):
            host = made.hosts[place]
            line = ["--nnodes", str(nodes or len(on)), "--coordinator", f"{made.hosts[0].ipv4}:{port}", *options]
            line += (each or {}).get(node, ("--node-rank", str(node)))
            variables = {**host.environment(), **(env or {}).get(node, {})}
            jobs.append(stack.enter_context(running(source, *line, ranks=ranks[node], env=variables, before=ENTERING)))
        yield jobs


def results(jobs: list[Running]) -> list[Ran]:
    """Wait for all agents; return their results."""
    return [job.result() for job in jobs]


def pids(job: Running, number: int) -> list[int]:
    """Wait for ``number`` workers of an agent; return their pids."""
    job.wait_for("here", number)
    found = []
    for pid in Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            if b"allhands.launch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
