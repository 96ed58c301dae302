"""Evaluation over ranks that have different numbers of samples."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

EXACT = """
import os
import torch
from torch.utils.data import DataLoader
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group(os.environ["BACKEND"], rank=rank, world_size=size, timeout=30)
data = torch.arange(100, 111)
for pad in (False, True):
    for shuffle in (False, True):
        sampler = dist.DistributedSampler(data, shuffle=shuffle, pad=pad)
        rows = list(DataLoader(data, batch_size=2, sampler=sampler))
        mine = torch.cat(rows)
        found = dist.gather_metrics(
            {"x": mine, "pair": (torch.stack([mine, -mine], 1).bfloat16(), mine % 2 == 0), "n": len(mine)},
            sampler=sampler,
        )
        if not shuffle:
            assert found["x"].tolist() == data.tolist(), found["x"]
        assert sorted(found["x"].tolist()) == data.tolist()
        assert torch.equal(found["pair"][0][:, 1], -found["x"].bfloat16())
        assert torch.equal(found["pair"][1], found["x"] % 2 == 0)
        assert found["n"].tolist() == ([4, 4, 3] if not pad else [4, 4, 4]), found["n"]
# Without a sampler: in order of ranks. A rank may have no rows.
assert dist.gather_metrics(torch.full((rank,), rank)).tolist() == [1, 2, 2]
assert dist.gather_metrics(torch.ones(0, 3)).shape == (0, 3)
assert dist.gather_metrics([0.5 * rank, torch.tensor(rank)])[0].tolist() == [0, 0.5, 1]
say(rows=attempt(dist.gather_metrics, torch.ones(2), sampler=dist.DistributedSampler(data)))
say(kind=attempt(dist.gather_metrics, "text"))
say(odd=attempt(dist.gather_metrics, torch.ones(2, 3 if rank == 1 else 4)))
"""


@pytest.mark.parametrize("backend", ["allhands", "gloo"])
def test_each_sample_counts_once(backend: str) -> None:
    """Every sample counts once and in order, padded or not; ranks may differ in rows but not in structure."""
    for result in harness.launch(EXACT, 3, {"BACKEND": backend}):
        assert result.returncode == 0, result.stderr
        assert result["rows"]["slug"] == "invalid-argument"
        assert result["kind"]["kind"] == "TypeError"
        assert result["odd"]["slug"] == "collective-mismatch"
        assert result["odd"]["ranks"] == [1]
        assert "ranks 0 and 2: " in result["odd"]["text"]
