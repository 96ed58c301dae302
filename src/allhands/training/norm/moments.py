"""Count, mean and variance per channel over the batches of all ranks, and the normalisation by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ... import _torch
from ...groups import collectives
from ..ddp import model_check

__all__ = ["DTYPES", "Moments", "combine", "gathered", "normalise", "pack", "summed", "wide"]

# What a batch may consist of; its place in this list travels with the moments, so that ranks can compare.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# What stands before the moments in a rank's record: the count, and the type of its batch.
_HEAD = 2

_all_reduce = collectives.quick("all_reduce")


class Moments(NamedTuple):
    """The moments of all ranks' batches together; ``total`` counts values per channel, ``dtypes`` is each rank's."""

    mean: torch.Tensor
    var: torch.Tensor
    total: torch.Tensor
    dtypes: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that statistics of a batch of ``dtype`` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's record: count, type, means, variances, in float64.

    In float64 counts are exact, and putting records together rounds nothing that the batch itself did not.
    """
    channels = batch.shape[1]
    record = torch.zeros(_HEAD + 2 * channels, dtype=torch.float64, device=batch.device)
    record[1] = DTYPES.index(batch.dtype)
    if batch.numel():
        mean, var = _moments(batch)
        record[0] = batch.numel() // channels
        record[_HEAD : _HEAD + channels] = mean
        record[_HEAD + channels :] = var
    return record


def _moments(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance per channel, in the wide type."""
    kept = wide(batch.dtype)
    if torch.compiler.is_compiling():
        # The compiler knows this one, and makes a kernel of it; by itself it takes four times as long as the other.
        var, mean = torch.var_mean(batch.to(kept), (0, *range(2, batch.dim())), correction=0)
        return mean, var
    # Given in the wide type, so that the kernel answers in it; what it writes into them is not looked at.
    scratch = torch.zeros(2, batch.shape[1], dtype=kept, device=batch.device)
    mean, var = torch.batch_norm_update_stats(batch, scratch[0], scratch[1], 1.0)
    return mean, var


def combine(records: torch.Tensor) -> Moments:
    """Put the records of all ranks together (one row each); the same bits on every rank."""
    channels = (records.shape[1] - _HEAD) // 2
    counts = records[:, :1]
    means = records[:, _HEAD : _HEAD + channels]
    total = counts.sum()
    # Where nobody has a value there is nothing to weigh; not 0/0.
    weights = counts / total.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (records[:, _HEAD + channels :] + (means - mean).square())).sum(0)
    return Moments(mean, var, total, records[:, 1])


def gathered(record: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Return the records of all ranks of the group of that name, one row for each of the ``size`` ranks."""
    if torch.compiler.is_compiling():
        found: torch.Tensor = _gather_op(record, group, size)
        return found
    return model_check.gather(record, _torch.group_named(group))


def summed(sums: torch.Tensor, group: str) -> torch.Tensor:
    """Return ``sums`` added up over all ranks of the group of that name; may do so in place."""
    if torch.compiler.is_compiling():
        found: torch.Tensor = _sum_op(sums, group)
        return found
    _all_reduce(sums, group=_torch.group_named(group))
    return sums


# A compiled graph cannot hold our collectives themselves. As operators they stay whole in it, and go to our engine.
@torch.library.custom_op("allhands::moments_gather", mutates_args=())
def _gather_op(record: torch.Tensor, group: str, size: int) -> torch.Tensor:
    del size
    return model_check.gather(record, _torch.group_named(group))


@_gather_op.register_fake
def _(record: torch.Tensor, group: str, size: int) -> torch.Tensor:
    del group
    return record.new_empty((size, *record.shape))


@torch.library.custom_op("allhands::moments_sum", mutates_args=())
def _sum_op(sums: torch.Tensor, group: str) -> torch.Tensor:
    found = sums.clone()
    _all_reduce(found, group=_torch.group_named(group))
    return found


@_sum_op.register_fake
def _(sums: torch.Tensor, group: str) -> torch.Tensor:
    del group
    return torch.empty_like(sums)


class _Normalise(torch.autograd.Function):
    """Normalise by given moments, of which the batch of every rank is a part: that is what backward has to know."""

    @staticmethod
    def forward(  # noqa: PLR0917  # torch calls it so
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        total: torch.Tensor,
        eps: float,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(batch, weight, bias, mean, var, total)
        ctx.eps, ctx.group = eps, group
        if not batch.numel():
            return torch.empty_like(batch)
        kept = wide(batch.dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(kept)
        shift = torch.zeros_like(mean) if bias is None else bias.to(kept)
        return torch.batch_norm(batch, scale, shift, mean, var, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight, bias, mean, var, total = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if batch.numel():
            # The moments twice: CPU kernels read them as running ones, CUDA's as those saved in forward.
            _, sum_grad_hat, sum_grad = torch.ops.aten.native_batch_norm_backward(
                grad, batch, scale, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
            )
        else:
            sum_grad_hat, sum_grad = torch.zeros_like(mean), torch.zeros_like(mean)
        # Local sums are what DistributedDataParallel expects of parameters; an empty batch has zeros, not nothing.
        grad_weight = sum_grad_hat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(bias.dtype) if ctx.needs_input_grad[2] else None
        grad_batch = None
        if ctx.needs_input_grad[0]:
            sums = summed(torch.stack([sum_grad, sum_grad_hat]), ctx.group) / total.clamp(min=1).to(mean.dtype)
            # scale * inverse * (grad - sums[0] - hat * sums[1]), as a * grad + (b * batch + c).
            a = scale * inverse
            b = -a * inverse * sums[1]
            c = -a * sums[0] - b * mean
            grad_batch = _affine(batch, grad, a, b, c)
        return grad_batch, grad_weight, grad_bias, None, None, None, None, None


def _affine(batch: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * grad + (b * batch + c)`` per channel, in the type of ``batch``."""
    shape = (1, -1, *(1,) * (batch.dim() - 2))
    if not batch.numel():
        return torch.empty_like(batch)
    if batch.dtype == a.dtype:
        # The kernel that normalises by given moments is the quickest way to multiply and add per channel.
        found = torch.batch_norm(batch, b, c, torch.zeros_like(b), torch.ones_like(b), False, 0.0, 0.0, False)
        return found.addcmul_(grad, a.view(shape))
    # Rounded once, at the end.
    found = (batch.to(a.dtype) * b.view(shape)).add_(c.view(shape))
    return found.addcmul_(grad.to(a.dtype), a.view(shape)).to(batch.dtype)


def normalise(
    batch: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    moments: Moments,
    *,
    eps: float,
    group: str,
) -> torch.Tensor:
    """Return ``batch`` normalised; its gradient goes through the moments of all ranks of ``group``."""
    kept = wide(batch.dtype)
    found: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        batch, weight, bias, moments.mean.to(kept), moments.var.to(kept), moments.total, eps, group
    )
    return found
