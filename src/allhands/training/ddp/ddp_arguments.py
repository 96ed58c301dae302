"""What the arguments of DistributedDataParallel mean, and which of them make no sense."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedParameter

from ... import _torch
from .bucket import FIRST_BYTES
from .errors import senseless

__all__ = ["Arguments"]

# torch's: large enough for an engine's full speed, small enough for several in a model that is worth distributing.
_CAP_MIB = 25.0


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was asked for, checked."""

    group: Any
    device: torch.device
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    several_devices: bool
    ignored: set[str]

    @classmethod
    def of(
        cls, module: torch.nn.Module, device_ids: Any, output_device: Any, process_group: Any, device_mesh: Any
    ) -> Arguments:
        """Check the arguments; raises invalid-argument."""
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [each for name, each in module.named_parameters() if name not in ignored]
        if not any(each.requires_grad for each in parameters):
            raise senseless(
                "it is not needed when a module has no parameter that requires a gradient",
                f"{type(module).__name__} has {len(parameters)} parameters, none of which does",
                "use the module as it is",
            )
        if any(isinstance(each, UninitializedParameter) for each in parameters):
            raise senseless(
                "the module has parameters that are not initialised",
                "lazy modules make their parameters in the first forward pass",
                "run a forward pass before wrapping it",
            )
        kinds = {each.device.type for each in parameters}
        if len(kinds) > 1:
            raise senseless(
                "the parameters are on devices of several types", ", ".join(sorted(kinds)), "move them to one type"
            )
        if device_ids is not None and len(device_ids) > 1:
            raise senseless(
                f"device_ids={device_ids} has more than one element",
                "each process has one device",
                "give one device to each process",
            )
        (kind,) = kinds
        several = len({each.device for each in parameters}) > 1
        if not device_ids or kind == "cpu" or several:
            if device_ids or output_device is not None:
                raise senseless(
                    f"device_ids={device_ids} and output_device={output_device} are for modules on one GPU",
                    f"the parameters are on {kind}" + (", on several devices" if several else ""),
                    "leave them out",
                )
            ids, output = None, None
        else:
            ids = [
                torch.device(kind, each).index if isinstance(each, int) else torch.device(each).index
                for each in device_ids
            ]
            output = ids[0] if output_device is None else output_device
        group = cls._group(process_group, device_mesh)
        return cls(group, parameters[0].device, kind, ids, output, several, ignored)

    @staticmethod
    def _group(process_group: Any, device_mesh: Any) -> Any:
        if device_mesh is None:
            return process_group if process_group is not None else dist.group.WORLD
        if process_group is not None:
            raise senseless(
                "Cannot specify both process_group and device_mesh arguments.",
                "both name the group",
                "give one of them",
            )
        if device_mesh.ndim != 1:
            raise senseless(
                f"Only 1D device mesh is supported, and this one has {device_mesh.ndim} dimensions",
                "the ranks of one group share a model",
                'give one dimension of it: mesh["name"]',
            )
        return device_mesh.get_group(mesh_dim=0)

    @staticmethod
    def caps_bytes(cap_mb: float | None, caps_mb: list[float] | None) -> tuple[int, ...]:
        """Return the sizes of the buckets: the last one is that of all further ones."""
        if cap_mb is not None and caps_mb is not None:
            raise senseless(
                "bucket_cap_mb and bucket_cap_mb_list were both given", "both name sizes", "give one of them"
            )
        if caps_mb:
            return tuple(int(each * 2**20) for each in caps_mb)
        cap = int((_CAP_MIB if cap_mb is None else cap_mb) * 2**20)
        return (cap,) if cap_mb is not None else (min(FIRST_BYTES, cap), cap)

    @staticmethod
    def check_hook(hook: Callable[..., Any], *, registered: bool) -> None:
        """Raise where ``hook`` cannot be a communication hook."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if registered:
            raise senseless("a communication hook is registered already", "there can be one", "make one hook of both")
        parameters = inspect.signature(hook).parameters
        if len(parameters) < 2:
            raise senseless(
                "a communication hook takes a state and a bucket", f"{hook} takes neither", "hook(state, bucket)"
            )
        bucket = parameters.get("bucket")
        if bucket is not None and bucket.annotation not in {
            inspect.Parameter.empty,
            _torch.GradBucket,
            "dist.GradBucket",
        }:
            raise senseless(
                "Communication hook: bucket annotation should be dist.GradBucket.",
                f"it is {bucket.annotation}",
                "annotate it so, or not at all",
            )
        returns = inspect.signature(hook).return_annotation
        if returns not in {inspect.Signature.empty, torch.futures.Future[torch.Tensor]} and not isinstance(
            returns, str
        ):
            raise senseless(
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
                f"it is {returns}",
                "annotate it so, or not at all",
            )
