from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.errors import ArgumentError
from allhands.training import SyncBatchNorm, revert_sync_batchnorm
from allhands.training.norm.sync_batch_norm import AnyBatchNorm, combine, pack


def model() -> nn.Module:
    """Return a model with every kind of BatchNorm, one of them shared."""
    twice = nn.BatchNorm1d(3, momentum=None)
    inner = nn.Sequential(twice, nn.BatchNorm2d(4, affine=False), nn.SyncBatchNorm(2, eps=0.5))
    return nn.ModuleDict(
        {"a": inner, "b": twice, "c": nn.BatchNorm3d(2, track_running_stats=False), "d": nn.Linear(2, 2)}
    )


def test_conversion_keeps_tensors_names_and_settings() -> None:
    """State dict, parameters and buffers are the same objects; reverting restores the classes."""
    plain = model()
    kinds = [type(module) for module in plain.modules()]
    before = {name: value.data_ptr() for name, value in plain.state_dict(keep_vars=True).items()}
    parameters = list(plain.parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(plain)
    assert converted is plain
    assert [type(module).__name__ for module in converted.modules()].count("SyncBatchNorm") == 4
    assert converted["a"][0] is converted["b"]
    assert (converted["b"].momentum, converted["a"][2].eps) == (None, 0.5)
    assert (converted["a"][1].affine, converted["c"].track_running_stats) == (False, False)
    assert {name: value.data_ptr() for name, value in converted.state_dict(keep_vars=True).items()} == before
    back = revert_sync_batchnorm(converted)
    assert [one is other for one, other in zip(back.parameters(), parameters, strict=True)] == [True] * len(parameters)
    assert [type(module) for module in back.modules()] == [
        AnyBatchNorm if kind is nn.SyncBatchNorm else kind for kind in kinds
    ]


def test_state_dicts_are_interchangeable_with_torchs() -> None:
    """Ours and torch's BatchNorm and SyncBatchNorm load each other's state; conversion keeps the mode."""
    ours = SyncBatchNorm(3)
    for theirs in (nn.BatchNorm2d(3), nn.SyncBatchNorm(3)):
        nn.init.uniform_(theirs.weight)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(ours.weight, theirs.weight)
    assert not SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3).eval()).training


def test_without_a_group_it_is_batchnorm() -> None:
    """Without a group the result is that of BatchNorm bit for bit, in training and in eval mode."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=None)
    sync = SyncBatchNorm(3, momentum=None)
    for _ in range(3):
        batch = torch.randn(4, 3, 2, 2)
        assert torch.equal(sync(batch), plain(batch))
    plain.eval(), sync.eval()
    assert torch.equal(sync(batch), plain(batch))
    assert AnyBatchNorm(3)(torch.randn(5, 3)).shape == (5, 3)


@pytest.mark.parametrize("batch", [torch.ones(3), torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int64)])
def test_batches_that_cannot_be_normalised(batch: torch.Tensor) -> None:
    """Invalid dimensions, channels and dtypes raise an error before any communication."""
    with pytest.raises(ArgumentError):
        SyncBatchNorm(3)(batch)


def test_lazy_layers_are_not_converted() -> None:
    """A lazy BatchNorm has no parameters to reuse."""
    with pytest.raises(ArgumentError, match="number of channels"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_moments_are_weighted_by_counts() -> None:
    """Combined moments of uneven and empty batches are those of all values, also far from zero."""
    torch.manual_seed(0)
    whole = torch.randn(100, 3) + 1e4
    records = torch.stack([pack(part) for part in (whole[:1], whole[1:1], whole[1:90], whole[90:])])
    found = combine(records)
    assert int(found.total) == 100
    torch.testing.assert_close(found.mean, whole.double().mean(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(found.var, whole.double().var(0, correction=0), rtol=1e-4, atol=0)
