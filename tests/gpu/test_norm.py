"""SyncBatchNorm of CUDA tensors against BatchNorm on the batches of all ranks in one."""

from __future__ import annotations

import pytest
import torch

from ranks import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU on this machine"),
]

SOURCE = """
import copy
import torch
from torch import nn
import allhands as dist

torch.cuda.set_device(0)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)

def compare(cuts, dtype, params, tolerance, layout=torch.contiguous_format):
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5).to(params)
    nn.init.uniform_(plain.weight)
    sync = dist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).cuda()
    wide = copy.deepcopy(plain).double()
    for _ in range(2):
        whole, slope = ((torch.randn(9, 5, 4, 3) * 2 + 3).to(dtype) for _ in range(2))
        reference = whole.double().clone().requires_grad_()
        expected = wide(reference)
        expected.backward(slope.double())
        part = slice(cuts[rank], cuts[rank + 1])
        own = whole[part].cuda().clone(memory_format=layout).requires_grad_()
        found = sync(own)
        found.backward(slope[part].cuda())
        for ours, theirs in ((found, expected[part]), (own.grad, reference.grad[part])):
            if ours.numel():
                torch.testing.assert_close(ours.double().cpu(), theirs, rtol=tolerance, atol=tolerance)
    for name, buffer in wide.named_buffers():
        torch.testing.assert_close(getattr(sync, name).double().cpu(), buffer.double(), rtol=1e-2, atol=1e-2)

for cuts in ([0, 4, 9], [0, 0, 9]):
    compare(cuts, torch.float64, torch.float64, 1e-10)
    compare(cuts, torch.float32, torch.float32, 1e-4)
    compare(cuts, torch.float16, torch.float32, 2e-2)
    compare(cuts, torch.bfloat16, torch.bfloat16, 1e-1)
    compare(cuts, torch.float32, torch.float32, 1e-4, torch.channels_last)
layer = dist.SyncBatchNorm(3 + rank).cuda()
say(odd=attempt(layer, torch.ones(4, 3 + rank, device="cuda")))
"""


def test_equals_batchnorm_of_all_batches() -> None:
    """Two ranks that share a GPU: outputs, gradients and statistics; uneven and empty batches, types, layouts."""
    for result in harness.launch(SOURCE, 2, fresh=True, timeout=180):
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        assert result["odd"]["slug"] == "collective-mismatch"
