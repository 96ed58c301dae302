"""Interpret and check the arguments of DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from ... import _torch
from ...errors import AllhandsError, fail

__all__ = ["caps_bytes", "check_hook", "checked_parameters", "invalid_argument", "one_device", "one_group"]

# torch's default of bucket_cap_mb: large enough for the engine's full bandwidth, small enough to overlap with backward.
_CAP_MIB = 25.0

# torch's size of the first bucket: small, so that the first reduction starts early in backward.
_FIRST_BYTES = 1 << 20


def invalid_argument(problem: str, why: str, fix: str) -> AllhandsError:
    """An argument is not supported or makes no sense."""
    return fail("invalid-argument", f"DistributedDataParallel: {problem}", who="this rank", why=why, fix=fix)


def checked_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of ``module`` that are not ignored. Raises invalid-argument if they cannot be trained."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = {name: each for name, each in module.named_parameters() if name not in ignored}
    if not any(each.requires_grad for each in named.values()):
        raise invalid_argument(
            "it is not needed when a module has no parameter that requires a gradient",
            f"{type(module).__name__} has {len(named)} parameters, none of which does",
            "use the module as it is",
        )
    if any(map(is_lazy, named.values())):
        raise invalid_argument(
            "the module has parameters that are not initialised",
            "lazy modules make their parameters in the first forward pass",
            "run a forward pass before wrapping it",
        )
    types = {each.device.type for each in named.values()}
    if len(types) > 1:
        raise invalid_argument(
            "the parameters are on devices of several types", ", ".join(sorted(types)), "move them to one type"
        )
    return named


def one_device(device_ids: Any, output_device: Any, found: set[torch.device]) -> tuple[list[int] | None, int | None]:
    """Return the arguments as numbers, None on a CPU; ``found`` are the devices of the parameters."""
    if device_ids is not None and len(device_ids) > 1:
        raise invalid_argument(
            f"device_ids={device_ids} has more than one element",
            "each process has one device",
            "give one device to each process",
        )
    device_type = next(iter(found)).type
    if device_ids and device_type != "cpu" and len(found) == 1:
        given = device_ids[0]
        index = given if isinstance(given, int) else torch.device(given).index
        return [index], index if output_device is None else output_device
    if device_ids or output_device is not None:
        raise invalid_argument(
            f"device_ids={device_ids} and output_device={output_device} are for modules on one GPU",
            f"the parameters are on {device_type}" + (", on several devices" if len(found) > 1 else ""),
            "leave them out",
        )
    return None, None


def one_group(process_group: Any, device_mesh: Any) -> Any:
    """Return the group that one of the arguments names, all ranks by default."""
    if device_mesh is None:
        return process_group if process_group is not None else dist.group.WORLD
    if process_group is not None:
        raise invalid_argument(
            "Cannot specify both process_group and device_mesh arguments.", "both name the group", "give one of them"
        )
    if device_mesh.ndim != 1:
        raise invalid_argument(
            f"Only 1D device mesh is supported, and this one has {device_mesh.ndim} dimensions",
            "the ranks of one group share a model",
            'give one dimension of it: mesh["name"]',
        )
    return device_mesh.get_group(mesh_dim=0)


def caps_bytes(cap_mb: float | None, caps_mb: list[float] | None) -> tuple[int, ...]:
    """Return the sizes of the buckets; the last one is that of all further ones."""
    if cap_mb is not None and caps_mb is not None:
        raise invalid_argument(
            "bucket_cap_mb and bucket_cap_mb_list were both given", "both name sizes", "give one of them"
        )
    if caps_mb:
        return tuple(int(each * 2**20) for each in caps_mb)
    cap = int((_CAP_MIB if cap_mb is None else cap_mb) * 2**20)
    return (cap,) if cap_mb is not None else (min(_FIRST_BYTES, cap), cap)


def check_hook(hook: Callable[..., Any], *, registered: bool) -> None:
    """Raise an error if ``hook`` is no communication hook, or one is registered already."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if registered:
        raise invalid_argument(
            "a communication hook is registered already", "there can be one", "make one hook of both"
        )
    signature = inspect.signature(hook)
    if len(signature.parameters) < 2:
        raise invalid_argument(
            "a communication hook takes a state and a bucket", f"{hook} takes neither", "hook(state, bucket)"
        )
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in {inspect.Parameter.empty, _torch.GradBucket, "dist.GradBucket"}:
        raise invalid_argument(
            "Communication hook: bucket annotation should be dist.GradBucket.",
            f"it is {bucket.annotation}",
            "annotate it so, or not at all",
        )
    returns = signature.return_annotation
    if not isinstance(returns, str) and returns not in {inspect.Signature.empty, torch.futures.Future[torch.Tensor]}:
        raise invalid_argument(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            f"it is {returns}",
            "annotate it so, or not at all",
        )
