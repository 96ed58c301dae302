"""Batch normalisation over the batches of all ranks, on CPUs and GPUs.

Forward: each rank packs count, mean and variance per channel into one record; one all_gather, and every rank combines
the records to the same moments. Backward: one all_reduce of two sums per channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import is_lazy

from ... import _torch
from ...errors import AllhandsError, fail
from ...groups import collectives
from .. import compare_ranks

__all__ = ["DTYPES", "AnyBatchNorm", "Moments", "SyncBatchNorm", "combine", "pack", "revert_sync_batchnorm"]

# The dtypes of batches; a record carries the index, so that ranks can compare.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_all_gather = collectives.fast_path("all_gather")
_all_reduce = collectives.fast_path("all_reduce")


class AnyBatchNorm(nn.BatchNorm2d):
    """BatchNorm of one rank for any number of dimensions: what a SyncBatchNorm of unknown origin reverts to."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SyncBatchNorm(_torch.BatchNormBase):  # type: ignore[misc]  # torch's base has no public name and no types
    """BatchNorm with the statistics of the batches of all ranks of ``process_group`` (all ranks by default).

    Takes batches of two dimensions and more, on any device; ranks may have batches of different size, or empty ones.
    The result and its gradients are those of BatchNorm for all batches in one; the gradients of weight and bias are
    local, for DistributedDataParallel to average. Parameters, buffers and state dict are those of torch's BatchNorm
    and SyncBatchNorm.

    In training every rank of the group must call it, forward and backward, the same number of times: one collective
    each way, and one more in the first forward, which compares the layers. In eval mode, without a group, and in a
    group of one, it is BatchNorm and does not communicate.

    Raises `CollectiveMismatch` if channels or dtypes differ between ranks, `ArgumentError` (a ValueError) for batches
    that cannot be normalised.
    """

    def __init__(  # noqa: PLR0917  # torch's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        **kw: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **kw)
        self.process_group = process_group
        # The class that it was converted from, for `revert_sync_batchnorm`.
        self.origin: type[nn.Module] | None = None
        self._compared = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalise a batch of shape (N, C, ...). In training, every rank of the group must call it."""
        group = self._group() if self.training else None
        if group is None:
            return super().forward(input)  # type: ignore[no-any-return]
        self._check_input_dim(input)
        factor = self.momentum
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if factor is None:
                # A tensor: reading the counter would synchronize a GPU.
                factor = 1.0 / self.num_batches_tracked.double()
        if torch.compiler.is_compiling() and not input.numel():
            return self._uncompiled(input, factor, group)  # type: ignore[no-any-return]
        return self._synchronized(input, factor, group)

    def _synchronized(
        self, batch: torch.Tensor, factor: float | torch.Tensor, group: Any, *, compare: bool = True
    ) -> torch.Tensor:
        """Normalise by the moments of all ranks; compiled code does not compare layers first."""
        compiling = torch.compiler.is_compiling()
        if compare and not compiling and not self._compared:
            layer = f"{self.num_features} channels, {_name(batch.dtype)}, eps {self.eps}, momentum {self.momentum}"
            compare_ranks.raise_if_different(
                "the SyncBatchNorm layers they call",
                compare_ranks.gather_text(layer, group, batch.device),
                group,
                fix="build the same model and use the same dtypes on every rank",
            )
            self._compared = True
        with torch.no_grad():
            record = pack(batch)
            records = record.new_empty((dist.get_world_size(group), *record.shape))
            (_gather_op if compiling else _gather)(records, record, group.group_name)
            moments = combine(records)
            if not compiling:
                self._check_moments(batch, moments, group)
            if self.track_running_stats:
                self._track(moments, factor)
        kept = _statistics_dtype(batch.dtype)
        result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            batch,
            self.weight,
            self.bias,
            moments.mean.to(kept),
            moments.var.to(kept),
            moments.total,
            self.eps,
            group.group_name,
        )
        return result

    @_torch.kept_out
    def _uncompiled(self, batch: torch.Tensor, factor: float | torch.Tensor, group: Any) -> torch.Tensor:
        """Do the same outside of compiled code, which would drop the collectives of an empty batch."""
        return self._synchronized(batch, factor, group, compare=False)

    def _group(self) -> Any:
        """Return the group to communicate with; None if there are no other ranks."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # torch's name
        """Raise an error for a batch that cannot be normalised, before any communication."""
        if input.dim() < 2:
            raise _invalid(
                f"SyncBatchNorm expects at least 2 dimensions, got {input.dim()}", "give batches of shape (N, C, ...)"
            )
        if input.shape[1] != self.num_features:
            raise _invalid(
                f"SyncBatchNorm was made for {self.num_features} channels, got {input.shape[1]}",
                f"give batches of shape (N, {self.num_features}, ...), or make the layer with num_features="
                f"{input.shape[1]}",
                why=f"the batch has shape {list(input.shape)}; its second dimension counts channels",
            )
        if input.dtype not in DTYPES:
            raise _invalid(
                f"SyncBatchNorm cannot normalise {input.dtype}", "convert the batch to a floating-point type"
            )

    @staticmethod
    def _check_moments(batch: torch.Tensor, moments: Moments, group: Any) -> None:
        """Raise on every rank if dtypes differ, or if all batches together have one value per channel.

        On a GPU only the latter is checked, and only for small batches: reading a tensor synchronizes the device.
        """
        if batch.is_cpu and not bool((moments.dtypes == moments.dtypes[0]).all()):
            values = [f"a batch of {_name(DTYPES[int(index)])}" for index in moments.dtypes]
            compare_ranks.raise_if_different(
                "the batches passed to SyncBatchNorm", values, group, fix="pass the same dtype on every rank"
            )
        if batch.numel() // batch.shape[1] <= 1 and int(moments.total) == 1:
            raise _invalid(
                "SyncBatchNorm expects more than 1 value per channel when training",
                "use larger batches, or eval()",
                who="all ranks of the group together",
                why="one value is its own mean, and its variance is 0",
            )

    def _track(self, moments: Moments, factor: float | torch.Tensor) -> None:
        """Update the running statistics; with the unbiased variance, as BatchNorm does."""
        # If all batches are empty the statistics stay as they are.
        weight = (moments.total > 0).to(moments.total.dtype) * factor
        unbiased = moments.var * (moments.total / (moments.total - 1).clamp(min=1))
        for running, new in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - weight) + new * weight)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm in ``module`` (torch's SyncBatchNorm too) by one of these, and return the module.

        Parameters and buffers are reused, not copied. If ``module`` is itself a BatchNorm, a new one is returned.
        `revert_sync_batchnorm` is the reverse.
        """

        def make(found: Any) -> nn.Module:
            if any(map(is_lazy, (*found.parameters(), *found.buffers()))):
                raise _invalid(
                    f"{type(found).__name__} does not know its number of channels yet",
                    "run one batch through the model before converting it",
                )
            made = cls(*_arguments(found), process_group)
            if isinstance(found, SyncBatchNorm):
                made.origin = found.origin
            else:
                plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
                made.origin = next((each for each in plain if isinstance(found, each)), None)
            return _move_state(found, made)

        return _replace(module, _torch.BatchNormBase, make)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every SyncBatchNorm in ``module``, ours and torch's, by a BatchNorm of one rank, and return the module.

    Its class is the one that it was converted from if known, else one for any number of dimensions. Parameters and
    buffers are reused, not copied.
    """

    def make(found: Any) -> nn.Module:
        plain = getattr(found, "origin", None) or AnyBatchNorm
        return _move_state(found, plain(*_arguments(found)))

    return _replace(module, (SyncBatchNorm, nn.SyncBatchNorm), make)


def _replace(module: nn.Module, kinds: Any, make: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace each module of ``kinds`` by the result of ``make``, a shared one by the same result everywhere."""
    if isinstance(module, kinds):
        return make(module)
    made = functools.cache(make)
    found = [(name, each) for name, each in module.named_modules(remove_duplicate=False) if isinstance(each, kinds)]
    for name, each in found:
        module.set_submodule(name, made(each))
    return module


def _arguments(module: Any) -> tuple[Any, Any, Any, Any, Any]:
    return module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats


def _move_state(source: Any, target: nn.Module) -> nn.Module:
    """Set the tensors and mode of ``target`` to those of ``source``, so that optimizers keep the same tensors."""
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(target, name, getattr(source, name))
    target.train(source.training)
    if hasattr(source, "qconfig"):  # set by torch.ao.quantization
        target.qconfig = source.qconfig
    return target


def _invalid(problem: str, fix: str, *, who: str = "this process", why: str = "") -> AllhandsError:
    return fail("invalid-argument", problem, who=who, why=why, fix=fix)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Moments ---------------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """The moments of all ranks' batches; ``total`` counts values per channel, ``dtypes`` has one index per rank."""

    mean: torch.Tensor
    var: torch.Tensor
    total: torch.Tensor
    dtypes: torch.Tensor


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's record in float64: a row of count and means, and one of dtype and biased variances.

    In float64 counts are exact, and combining records adds no rounding error that is visible in float32.
    """
    record = torch.zeros(2, 1 + batch.shape[1], dtype=torch.float64, device=batch.device)
    record[1, 0] = DTYPES.index(batch.dtype)
    kept = _statistics_dtype(batch.dtype)
    if not batch.numel():
        return record
    if torch.compiler.is_compiling():
        # The compiler generates a kernel for this; in eager mode it is four times slower than the other.
        var, mean = torch.var_mean(batch.to(kept), (0, *range(2, batch.dim())), correction=0)
    else:
        # The kernel returns the dtype of these running statistics, which are not used otherwise.
        running = torch.zeros(2, batch.shape[1], dtype=kept, device=batch.device)
        mean, var = torch.batch_norm_update_stats(batch, running[0], running[1], 1.0)
    record[0, 0] = batch.numel() // batch.shape[1]
    record[0, 1:], record[1, 1:] = mean, var
    return record


def combine(records: torch.Tensor) -> Moments:
    """Combine the records of all ranks; the same bits on every rank."""
    counts, means, variances = records[:, 0, :1], records[:, 0, 1:], records[:, 1, 1:]
    total = counts.sum()
    # clamp: no division by zero if all batches are empty.
    weights = counts / total.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return Moments(mean, var, total, records[:, 1, 0])


def _gather(records: torch.Tensor, record: torch.Tensor, group: str) -> None:
    """Set the rows of ``records`` to the records of all ranks of the group of that name."""
    _all_gather(list(records.unbind(0)), record, group=_torch.group_named(group))


def _sum(sums: torch.Tensor, group: str) -> None:
    """Add up ``sums`` over the ranks of the group of that name, in place."""
    _all_reduce(sums, group=_torch.group_named(group))


# torch.compile cannot trace our collectives; custom operators stay opaque calls in its graph.
_gather_op = torch.library.custom_op("allhands::moments_gather", _gather, mutates_args=("records",))
_sum_op = torch.library.custom_op("allhands::moments_sum", _sum, mutates_args=("sums",))


class _Normalise(torch.autograd.Function):
    """Normalise by given moments; backward includes their dependence on the batches of all ranks."""

    @staticmethod
    def forward(  # noqa: PLR0917  # torch's interface
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
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return torch.batch_norm(batch, scale, shift, mean, var, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight, bias, mean, var, total = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if batch.numel():
            # CPU kernels read the first pair of moments (running), CUDA kernels the second (saved in forward).
            _, sum_grad_hat, sum_grad = torch.ops.aten.native_batch_norm_backward(
                grad, batch, scale, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
            )
        else:
            sum_grad_hat, sum_grad = torch.zeros_like(mean), torch.zeros_like(mean)
        # Local sums, which DistributedDataParallel averages; zeros for an empty batch, so that no gradient is missing.
        grad_weight = sum_grad_hat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(bias.dtype) if ctx.needs_input_grad[2] else None
        grad_batch = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_grad, sum_grad_hat])
            (_sum_op if torch.compiler.is_compiling() else _sum)(sums, ctx.group)
            sums = sums / total.clamp(min=1).to(mean.dtype)
            # scale * inverse * (grad - sums[0] - hat * sums[1]), as a * grad + (b * batch + c).
            a = scale * inverse
            b = -a * inverse * sums[1]
            c = -a * sums[0] - b * mean
            grad_batch = _affine(batch, grad, a, b, c)
        return grad_batch, grad_weight, grad_bias, None, None, None, None, None


def _affine(batch: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * grad + (b * batch + c)`` per channel, in the dtype of ``batch``."""
    shape = (1, -1, *(1,) * (batch.dim() - 2))
    if not batch.numel():
        return torch.empty_like(batch)
    if batch.dtype == a.dtype:
        # batch_norm with given moments is the fastest kernel that multiplies and adds per channel.
        found = torch.batch_norm(batch, b, c, torch.zeros_like(b), torch.ones_like(b), False, 0.0, 0.0, False)
        return found.addcmul_(grad, a.view(shape))
    # In the wider dtype, rounded once at the end.
    found = (batch.to(a.dtype) * b.view(shape)).add_(c.view(shape))
    return found.addcmul_(grad.to(a.dtype), a.view(shape)).to(batch.dtype)
