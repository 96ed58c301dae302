"""Memory that comes and goes in every step is not asked for anew each time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: what the C library has learned before would count.
_SCRIPT = """
import ctypes, json, resource
import torch
from allhands.training.ddp import malloc_hint

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    # Not as tensors: what torch and Python allocate for those may come to lie behind them, which keeps them too.
    kept = [libc.malloc(1 << 20) for _ in range(28)]
    for address in kept:
        ctypes.memset(address, 1, 1 << 20)
    for address in kept:
        libc.free(address)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

for _ in range(3):
    step()
before = faults()
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
malloc_hint.keep(28 << 20)
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
for _ in range(3):
    step()
print(json.dumps({"before": before, "after": faults(), "taken_kib": taken}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what glibc does")
def test_steps_take_no_new_pages() -> None:
    """Of 28 blocks of 1 MiB most pages were new in every step; and teaching it otherwise takes none."""
    run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(run.stdout)
    assert found["before"] > 1000
    assert found["after"] < 100
    assert found["taken_kib"] < 1024
