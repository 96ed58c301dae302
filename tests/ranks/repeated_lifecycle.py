"""Forming and ending a group again and again in the same processes, and what is left of it afterwards."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import leaks
from ranks.harness import Result, free_port, launch

__all__ = ["METHODS", "cycle"]

# Where ranks meet: nowhere in particular (one host, a Unix socket), or at the same TCP port each time.
METHODS = ("unix", "tcp")

SCRIPT = """
import gc, os, threading, time
import torch
import allhands as dist
from allhands.groups import session

def held():
    gc.collect()  # An ended member keeps one descriptor until it is collected.
    return len(os.listdir("/proc/self/fd")), threading.active_count()

places, slowest = set(), 0.0
for turn in range(int(os.environ["TURNS"])):
    begun = time.monotonic()
    dist.init_process_group("gloo", os.environ["METHOD"] or None, 60, size, rank)
    x = torch.full((1000,), float(rank + turn))
    dist.all_reduce(x)
    assert torch.all(x == sum(range(size)) + size * turn), x[0]
    beside = session.current().coordinator_process
    if beside is not None:
        places.add(beside.unix)
    dist.destroy_process_group()
    slowest = max(slowest, time.monotonic() - begun)
    if turn == 2:
        early = held()
say(turns=turn + 1, places=sorted(places), slowest=slowest, early=early, late=held())
"""


def cycle(world_size: int, turns: int, method: str, folder: Path, timeout: float) -> float:
    """Form and end a group of ``world_size`` ``turns`` times; assert that nothing is left; return the slowest turn."""
    port = free_port() if method == "tcp" else 0
    before = leaks.segments()
    results = launch(
        SCRIPT,
        world_size,
        {"TURNS": str(turns), "METHOD": f"tcp://127.0.0.1:{port}" if port else "", "TMPDIR": str(folder)},
        timeout=timeout,
    )
    # Whoever failed first is the cause; the others only missed it.
    failed = sorted((each for each in results if each.returncode or complaints(each)), key=lambda each: each.seconds)
    assert not failed, "\n".join(f"rank {each.rank}: {each.stderr}" for each in failed)
    for result in results:
        assert result["turns"] == turns
        # Descriptors and threads of a rank are those of its third group: none grows with the number of groups.
        assert result["late"] == result["early"]
    places = results[0]["places"]
    assert places
    assert listening(places) == []
    assert list(folder.iterdir()) == []
    assert leaks.segments() <= before
    if port:
        with socket.socket() as probe:
            # Without SO_REUSEADDR a listener, and also a connection that was closed from here, would block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    return max(result["slowest"] for result in results)


def complaints(result: Result) -> list[str]:
    """Return what a rank wrote to standard error besides whom it was waiting for: that is the machine's load."""
    return [line for line in result.stderr.splitlines() if not line.startswith("allhands rank ")]


def listening(names: Iterable[str]) -> list[str]:
    """Return which of the abstract Unix sockets ``names`` still exist."""
    table = Path("/proc/net/unix").read_text(errors="replace")
    return [name for name in names if f"@{name}" in table]
