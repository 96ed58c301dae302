"""torch's own groups across hosts: calls that differ are told on every rank, and what only looks odd is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from hosts.conftest import Making, Network, outcomes
from hosts.test_hosts import ENTER, PORT
from hosts.test_wide import LAYOUT, MISMATCHES
from ranks.harness import Result, launch

pytestmark = pytest.mark.hosts

# A deadline, not a figure: everyone is told about half a second after the calls.
SOON_S = 5.0

FORM = (
    ENTER
    + """
import torch.distributed as torch_dist
torch.set_num_threads(1)
dist.init_process_group("gloo", os.environ["METHOD"], float(os.environ["TIMEOUT"]), size, rank)
"""
)


def run(made: Network, source: str, timeout: float = 30, layout: list[int] = LAYOUT) -> list[Result]:
    """Run ``source`` on ranks of two hosts, after they formed a group of torch's Gloo."""
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": str(timeout)}
    return launch(FORM + source, len(layout), env, each=made.each(layout), timeout=120)


def told(found: list[dict[str, Any]], odd: int) -> None:
    """Check that all were told of the odd rank, with what it called and where."""
    assert [(outcome["slug"], outcome["ranks"]) for outcome in found] == [("collective-mismatch", [odd])] * len(found)
    assert all(f"rank {odd} called" in outcome["text"] and "script.py:" in outcome["text"] for outcome in found)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_across_hosts(network: Making, kind: str) -> None:
    """A rank on one host that calls something else: all raise collective-mismatch, at the latest in their next call."""
    usual, odd = MISMATCHES[kind]
    results = run(
        network(),
        f"""
dist.barrier()
def calls():
    {odd} if rank == 3 else {usual}
    # Whoever came out of it with garbage learns of it here.
    time.sleep(2)
    dist.barrier()
say(outcome=attempt(calls))
""",
    )
    found = outcomes(results, at_most=SOON_S)
    assert len(found) == 4
    told(found, 3)
