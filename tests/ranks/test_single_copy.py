"""Large tensors are read by single copy if the kernel allows it; otherwise they go through the slots."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

SCRIPT = """
import ctypes, os, struct
import torch
import allhands as dist
from allhands import _core

# As on a processor without a victim L3; with one, no rank uses single copy.
format = _core.segment_format
_core.segment_format = lambda *given: format(*given[:5], VICTIM_L3)

def forbid_reading():
    # What containers may do: a filter in the kernel that answers process_vm_readv with EPERM.
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filter = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP

if rank in FORBIDDEN:
    forbid_reading()
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
group = dist.group.WORLD
for count in (7, 100_000, 300_000):
    for again in range(2):
        mine = torch.arange(count) + rank
        gathered = [torch.zeros(count, dtype=mine.dtype) for _ in range(size)]
        dist.all_gather(gathered, mine)
        assert all(torch.equal(part, torch.arange(count) + other) for other, part in enumerate(gathered))
        split = torch.arange(count * size) * (rank + 1)
        got = torch.zeros_like(split)
        dist.all_to_all_single(got, split)
        want = [torch.arange(count * size)[rank * count : (rank + 1) * count] * (other + 1) for other in range(size)]
        assert torch.equal(got, torch.cat(want))
say(reached=group.segment.single_copy_calls)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("forbidden", "victim_l3", "some"),
    [("()", False, True), ("(1,)", False, False), ("(0, 1, 2)", False, False), ("()", True, False)],
)
def test_a_rank_that_may_not_read_takes_the_slots_and_all_with_it(forbidden: str, victim_l3: bool, some: bool) -> None:
    """If any rank may not read, results are right and all ranks use the same method; with a victim L3 none reads."""
    script = SCRIPT.replace("FORBIDDEN", forbidden).replace("VICTIM_L3", str(victim_l3))
    results = harness.well(harness.launch(script, 3))
    counts = {result["reached"] for result in results}
    assert len(counts) == 1
    assert (counts.pop() > 0) == some
