"""Batch normalisation over the batches of all ranks, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _torch
from ...errors import fail
from ..ddp import model_check
from .moments import DTYPES, Moments, combine, gathered, normalise, pack

__all__ = ["AnyBatchNorm", "SyncBatchNorm", "revert_sync_batchnorm"]


class AnyBatchNorm(nn.BatchNorm2d):
    """BatchNorm of one rank for any number of dimensions: what a SyncBatchNorm of unknown origin reverts to."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


# In the order in which they are looked for.
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_torch.BatchNormBase):  # type: ignore[misc]  # torch's base has no public name and no types
    """BatchNorm whose statistics are those of the batches of all ranks of ``process_group`` (all ranks by default).

    Takes batches of two dimensions and more, on any device; ranks may have batches of different size, or empty ones.
    What it normalises by is what BatchNorm would have for all batches in one, and so are the gradients; those of
    weight and bias are local, for DistributedDataParallel to average. Parameters, buffers and state dict are those of
    torch's BatchNorm and SyncBatchNorm.

    In training every rank of the group must call it, forward and backward, the same number of times: one collective
    each way, and one more in the first forward, which compares the layers. In eval mode, without a group, and in a
    group of one, it is BatchNorm and calls nobody.

    Raises `CollectiveMismatch` where channels or types differ between ranks, `ArgumentError` (a ValueError) for batches
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
        # The class that it was made of, for the way back.
        self.origin: type[nn.Module] | None = None
        self._agreed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalise a batch of shape (N, C, ...). In training, every rank of the group must call it."""
        self._check(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                # A tensor, so that nobody has to wait for a GPU to know it.
                factor = 1.0 / self.num_batches_tracked.double()
        group = self._group() if self.training else None
        if group is None:
            alone = self.training or (self.running_mean is None and self.running_var is None)
            tracked = not self.training or self.track_running_stats
            return nn.functional.batch_norm(
                input,
                self.running_mean if tracked else None,
                self.running_var if tracked else None,
                self.weight,
                self.bias,
                alone,
                float(factor),
                self.eps,
            )
        if torch.compiler.is_compiling() and not input.numel():
            found: torch.Tensor = self._apart(input, factor, group)
            return found
        return self._synced(input, factor, group)

    def _synced(
        self, batch: torch.Tensor, factor: float | torch.Tensor, group: Any, *, compare: bool = True
    ) -> torch.Tensor:
        """Normalise by the moments of all ranks; compiled code does not compare layers first."""
        compiling = torch.compiler.is_compiling()
        if compare and not compiling and not self._agreed:
            self._agree(batch, group)
        with torch.no_grad():
            moments = combine(gathered(pack(batch), group.group_name, dist.get_world_size(group)))
            if not compiling:
                self._look(batch, moments, group)
            if self.track_running_stats:
                self._track(moments, factor)
        return normalise(batch, self.weight, self.bias, moments, eps=self.eps, group=group.group_name)

    @_torch.kept_out
    def _apart(self, batch: torch.Tensor, factor: float | torch.Tensor, group: Any) -> torch.Tensor:
        """Do the same outside of compiled code, which leaves out what has no effect on an empty batch.

        The other ranks wait for it.
        """
        return self._synced(batch, factor, group, compare=False)

    def _group(self) -> Any:
        """Return the group to talk to; None where there is nobody else in it."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _check(self, batch: torch.Tensor) -> None:
        """Refuse what cannot be normalised, before anybody else is asked."""
        if batch.dim() < 2:
            raise fail(
                "invalid-argument",
                f"SyncBatchNorm expects at least 2 dimensions, got {batch.dim()}",
                who="this process",
                fix="give batches of shape (N, C, ...)",
            )
        if batch.shape[1] != self.num_features:
            raise fail(
                "invalid-argument",
                f"SyncBatchNorm was made for {self.num_features} channels, got {batch.shape[1]}",
                who="this process",
                why=f"the batch has shape {list(batch.shape)}; its second dimension counts channels",
                fix=f"give batches of shape (N, {self.num_features}, ...), or make the layer with num_features="
                f"{batch.shape[1]}",
            )
        if batch.dtype not in DTYPES:
            raise fail(
                "invalid-argument",
                f"SyncBatchNorm cannot normalise {batch.dtype}",
                who="this process",
                fix="convert the batch to a floating-point type",
            )

    def _agree(self, batch: torch.Tensor, group: Any) -> None:
        """Compare the layer with those of the other ranks, once."""
        words = (
            f"{self.num_features} channels, {str(batch.dtype).removeprefix('torch.')}, eps {self.eps}, "
            f"momentum {self.momentum}"
        )
        said = model_check.exchange(words, group, batch.device)
        problem = model_check.difference(
            "the SyncBatchNorm that they call",
            said,
            group,
            fix="build the same model and give the same types everywhere",
        )
        if problem is not None:
            raise problem
        self._agreed = True

    def _look(self, batch: torch.Tensor, moments: Moments, group: Any) -> None:
        """Raise where what the ranks brought does not fit or is too little, on every rank alike.

        On a GPU only where it may be too little: looking makes the host wait for all before it.
        """
        few = batch.numel() // batch.shape[1] <= 1
        if batch.is_cpu and not bool((moments.dtypes == moments.dtypes[0]).all()):
            said = [f"a batch of {str(DTYPES[int(code)]).removeprefix('torch.')}" for code in moments.dtypes]
            problem = model_check.difference(
                "the batch that they give to SyncBatchNorm", said, group, fix="give the same type everywhere"
            )
            if problem is not None:
                raise problem
        if few and int(moments.total) == 1:
            raise fail(
                "invalid-argument",
                "SyncBatchNorm expects more than 1 value per channel when training",
                who="all ranks of the group together",
                why="one value is its own mean, and its variance is 0",
                fix="use larger batches, or eval()",
            )

    def _track(self, moments: Moments, factor: float | torch.Tensor) -> None:
        """Update the running statistics; with the unbiased variance, as BatchNorm does."""
        # Nobody had a value: nothing was learnt.
        share = (moments.total > 0).to(moments.total.dtype) * factor
        unbiased = moments.var * (moments.total / (moments.total - 1).clamp(min=1))
        for running, new in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - share) + new * share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm in ``module`` (torch's SyncBatchNorm too) by one of these, and return the module.

        Parameters and buffers are taken over, not copied. Where ``module`` is itself a BatchNorm, a new one is
        returned. `revert_sync_batchnorm` is the way back.
        """

        def make(found: Any) -> nn.Module:
            if any(map(is_lazy, (*found.parameters(), *found.buffers()))):
                raise fail(
                    "invalid-argument",
                    f"{type(found).__name__} does not know its number of channels yet",
                    who="this process",
                    fix="run one batch through the model before converting it",
                )
            made = cls(*_arguments(found), process_group)
            made.origin = found.origin if isinstance(found, SyncBatchNorm) else _origin(found)
            return _moved(found, made)

        return _replaced(module, _torch.BatchNormBase, make)


def _replaced(module: nn.Module, kinds: Any, make: Callable[[Any], nn.Module]) -> nn.Module:
    """Put what ``make`` makes of each module of ``kinds`` in its place; one that stands in two places stays one."""
    if isinstance(module, kinds):
        return make(module)
    made: dict[nn.Module, nn.Module] = {}
    found = [(name, each) for name, each in module.named_modules(remove_duplicate=False) if isinstance(each, kinds)]
    for name, each in found:
        if each not in made:
            made[each] = make(each)
        module.set_submodule(name, made[each])
    return module


def _origin(module: nn.Module) -> type[nn.Module] | None:
    return next((plain for plain in _PLAIN if isinstance(module, plain)), None)


def _arguments(module: Any) -> tuple[Any, Any, Any, Any, Any]:
    return module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats


def _moved(source: Any, target: Any) -> nn.Module:
    """Give ``target`` the parameters, buffers and mode of ``source``: the same tensors, so optimisers keep theirs."""
    target.weight, target.bias = source.weight, source.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(target, name, getattr(source, name))
    target.train(source.training)
    if hasattr(source, "qconfig"):  # torch.ao.quantization's mark
        target.qconfig = source.qconfig
    moved: nn.Module = target
    return moved


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every SyncBatchNorm in ``module``, ours and torch's, by a BatchNorm of one rank, and return the module.

    It is the class that it was converted from where that is known, else one that takes any number of dimensions.
    Parameters and buffers are taken over, not copied.
    """

    def make(found: Any) -> nn.Module:
        plain = getattr(found, "origin", None) or AnyBatchNorm
        return _moved(found, plain(*_arguments(found)))

    return _replaced(module, (SyncBatchNorm, nn.SyncBatchNorm), make)
