"""Tensors above 4 GiB: right at the far end and at the border of 32 bits, in no more shared memory than small ones."""

from __future__ import annotations

import psutil
import pytest

from ranks import harness

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

# A little above 2**32 bytes, with a last chunk that is not whole.
BYTES = (1 << 32) + (1 << 26) + 12_345

# Allowed growth of a rank besides its tensors: a thread's stack, the heap. Staging all data would be 4 GiB.
SMALL = 64 << 20

SCRIPT = """
import threading, time
from pathlib import Path
import torch
import allhelper_threads as dist

torch.set_num_threads(1)
BYTES, NAME = {size!r}, {name!r}
dist.init_process_group("allhelper_threads", rank=rank, world_size=size, timeout=300)

# The border of 32 bits, the beginning, the end, and one chunk in the middle of nowhere.
PLACES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 3 << 30, BYTES // 2, BYTES - 2, BYTES - 1]

def memory():
    # In KiB: all that is in memory, and what of it is shared (the segment, and nothing else).
    found = {{}}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        found[name] = int(value) << 10
    return found["Rss:"], found["Pss_Shmem:"]

class Watch(threading.Thread):
    # The most that this rank had while something ran.
    def run(self):
        self.over, self.rss, self.shared = False, *memory()
        while not self.over:
            rss, shared = memory()
            self.rss, self.shared = max(self.rss, rss), max(self.shared, shared)
            time.sleep(0.05)

def pattern(seed):
    # Numbers that differ from place to place and from rank to rank, made without a second tensor of that size.
    made = torch.empty(BYTES, dtype=torch.uint8)
    step = 1 << 26
    row = (torch.arange(step) * 7 + torch.arange(step) // 251).to(torch.uint8)
    for at in range(0, BYTES, step):
        part = made[at : at + step]
        part.copy_(row[: part.numel()]).add_((at >> 26) * 3 + seed)
    return made

def check(tensor, *sources):
    # Against the sum of patterns: all of it in pieces, and the places by themselves.
    step = 1 << 26
    row = (torch.arange(step) * 7 + torch.arange(step) // 251).to(torch.uint8)
    for at in range(0, BYTES, step):
        part = tensor[at : at + step]
        want = torch.zeros_like(part)
        for seed in sources:
            want.add_(row[: part.numel()] + ((at >> 26) * 3 + seed) % 256)
        assert torch.equal(part, want), f"differs in the 64 MiB from byte {{at}}"
    for place in PLACES:
        inside = place % step
        want = sum(inside * 7 + inside // 251 + (place >> 26) * 3 + seed for seed in sources) % 256
        assert tensor[place].item() == want, place

# Of all_gather only rank 0 has that much to give: twice everything would need twice the memory.
small = NAME == "all_gather" and rank == 1
mine = torch.full((1000,), 9, dtype=torch.uint8) if small else pattern(rank)
if NAME == "all_gather":
    others = [torch.zeros(BYTES, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)]
dist.all_reduce(torch.ones(1 << 20))
before = memory()
watch = Watch(daemon=True)
watch.start()
started = time.monotonic()
if NAME == "all_reduce":
    dist.all_reduce(mine)
elif NAME == "broadcast":
    dist.broadcast(mine, 1)
elif NAME == "all_gather":
    dist.all_gather(others, mine)
elif rank == 0:
    dist.send(mine, 1)
else:
    dist.recv(mine, 0)
seconds = time.monotonic() - started
watch.over = True
watch.join()
if NAME == "all_reduce":
    check(mine, *range(size))
elif NAME == "all_gather":
    check(others[0], 0)
    assert others[1].tolist() == [9] * 1000
else:
    check(mine, 1 if NAME == "broadcast" else 0)
segment = getattr(dist.group.WORLD.engine, "size_bytes", 0)
say(rss=watch.rss - before[0], shared=watch.shared, seconds=seconds, segment=segment)
dist.destroy_process_group()
"""


def _run(name: str, env: dict[str, str]) -> list[harness.Result]:
    tensors = 3 if name == "all_gather" else 2
    need = tensors * BYTES + (2 << 30)
    available = psutil.virtual_memory().available
    if available < need:
        pytest.skip(f"needs {need >> 30} GiB of free memory, there are {available >> 30}")
    results = harness.launch(SCRIPT.format(size=BYTES, name=name), 2, env, timeout=400)
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"
        print(  # noqa: T201  # what the test measures
            f"\n{name} rank {result.rank}: {result['seconds']:.1f} s, grew by {result['rss'] / 2**20:.1f} MiB, "
            f"share of shared memory {result['shared'] / 2**20:.1f} MiB, segment {result['segment'] / 2**20:.2f} MiB"
        )
    return results


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "send"])
def test_tensors_above_four_gibibytes(name: str) -> None:
    """Every byte is right, and no rank uses more memory for the call than the existing segment."""
    helper_threads = 3 if name == "all_reduce" else 0
    for result in _run(name, {"ALLHANDS_HELPER_THREADS": str(helper_threads)}):
        # For each of two ranks four slots of a MiB and two for messages, with their pages, envelopes, fingerprints and
        # payloads; and for each helper thread slots of 64 KiB with theirs.
        assert result["segment"] <= 2 * ((6 << 20) + (440 << 10) + helper_threads * (280 << 10))
        assert result["shared"] <= result["segment"] + (1 << 20)
        if name != "send":
            assert result["rss"] < SMALL
