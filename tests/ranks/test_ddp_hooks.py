"""Communication hooks and distributed optimizers with our DistributedDataParallel, against torch's on Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare
from ranks.training import BEGIN

pytestmark = pytest.mark.usefixtures("nursery")

TRIALS = (
    BEGIN
    + """
def hooked(hook, state=None, cap=0.001, **kw):
    ddp = DDP(Net(), bucket_cap_mb=cap)
    ddp.register_comm_hook(state, hook)
    return train(ddp, **kw)

def try_hooks_of_torch():
    # Behind another name: torch's class refuses it without NCCL.
    def bf16(state, bucket):
        return default_hooks.bf16_compress_hook(state, bucket)
    return [hooked(hook) for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, bf16,
                                      default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))]

def try_powersgd_hook():
    if torch.cuda.is_available():
        return ["where there is a GPU torch's hook waits for it, wherever its tensors are, and fails"]
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # One bucket: callbacks of several call into Gloo in an order of their own on each rank, and it hangs.
    found = hooked(powerSGD_hook.powerSGD_hook, state, cap=25, steps=5)
    assert state.compression_stats()[0] > 1, "nothing was compressed"
    return found

def try_a_hook_that_makes_another_tensor():
    def hook(state, bucket):
        assert len(bucket.gradients()) == len(bucket.parameters()) and bucket.index() >= 0
        work = torch_dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)
    return hooked(hook)

def try_zero_redundancy_and_join():
    ddp = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, parameters_as_bucket_view=True)
    torch.manual_seed(rank)
    with Join([ddp, optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            ddp(torch.randn(4, 10)).pow(2).mean().backward()
            optimizer.step()
    return list(ddp.state_dict().values())

def try_local_sgd():
    alone = torch_dist.new_subgroups(1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    ddp = DDP(Net())
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return train(ddp, steps=6, optimizer=PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager))
"""
)


def test_hooks_give_what_they_give_on_gloo() -> None:
    """Hooks of torch's and of a user's, ZeroRedundancyOptimizer and local SGD: the same bits with two ranks."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 5
