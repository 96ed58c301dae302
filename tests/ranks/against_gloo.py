"""Run the same cases on Gloo and on our backend in the same processes, and return the differences."""

from __future__ import annotations

from ranks import harness

__all__ = ["compare"]

# A case is a function named `try_…`, whose results are compared. With two ranks a sum has one order, so results agree
# bit for bit; with more, `close` is the tolerance.
DRIVER = """
import os
import traceback
import warnings

import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)

def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [part for key in sorted(value) for part in [key, *flat(value[key])]]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in flat(each)]
    return [value]

def differ(a, b, close):
    a, b = flat(a), flat(b)
    if len(a) != len(b):
        return f"{len(a)} values on Gloo, {len(b)} on ours"
    for number, (one, other) in enumerate(zip(a, b)):
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return f"value {number}: {one.shape} {one.dtype} on Gloo, {other.shape} {other.dtype} on ours"
            same = torch.allclose(one, other, rtol=close, atol=close) if close else torch.equal(one, other)
        else:
            same = abs(one - other) <= close * abs(one) if close and isinstance(one, float) else one == other
        if not same:
            return f"value {number}: {one} on Gloo, {other} on ours"
    return ""

def compare(close):
    trials = [value for name, value in globals().items() if name.startswith("try_")]
    found = {}
    for backend in ("gloo", "allhands"):
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=60)
        assert torch_dist.get_backend() == backend
        for trial in trials:
            torch.manual_seed(5)
            try:
                found[backend, trial.__name__] = flat(trial())
            except Exception:
                found[backend, trial.__name__] = None
                say(raised=f"{trial.__name__} on {backend}: {traceback.format_exc()}")
                raise
        dist.destroy_process_group()
    say(differences={t.__name__: differ(found["gloo", t.__name__], found["allhands", t.__name__], close)
                     for t in trials},
        values={t.__name__: len(found["gloo", t.__name__]) for t in trials})
"""


def compare(script: str, ranks: int, *, close: float = 0.0, timeout: float = 120) -> dict[str, str]:
    """Run every trial of ``script`` on both; return what differs by trial ("" where nothing does)."""
    results = harness.launch(DRIVER + script + f"\ncompare({close})\n", ranks, timeout=timeout)
    found: dict[str, str] = {}
    for result in results:
        assert result.returncode == 0, f"rank {result.rank} ({result.returncode}):\n{result.stdout}\n{result.stderr}"
        # A trial that returns nothing compares nothing.
        assert all(result["values"].values()), result["values"]
        for name, difference in result["differences"].items():
            found[name] = found.get(name, "") or (difference and f"rank {result.rank}: {difference}")
    return found
