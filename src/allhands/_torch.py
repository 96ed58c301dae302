"""The private names of torch that allhands cannot do without, each with the reason and the versions it was seen in.

Nothing else in allhands touches a private torch name; a test checks that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

__all__ = [
    "AllgatherOptions",
    "BatchNormBase",
    "FileStore",
    "GradBucket",
    "HashStore",
    "TCPStore",
    "backends",
    "batches_asked_for",
    "batches_handed_out",
    "coalescing",
    "counters",
    "default_timeout",
    "foreach_copy",
    "forget_failed_groups",
    "gather_flat",
    "gloo",
    "group_named",
    "groups",
    "kept_out",
    "loader_iterator",
    "nccl",
    "optimizers_in_backward",
    "options",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "plain",
    "premul_factor",
    "profiling",
    "queue_callback",
    "rendezvous",
    "stand_behind",
    "take_over_optimizers",
    "traced_as",
    "untraced",
    "untraced_frame",
    "untraced_function",
    "world_place",
]

# Public names that torch's own annotations hide: it imports them under a condition. They stand here so that the
# rest of allhands is checked strictly.
AllgatherOptions: Any = c10d.AllgatherOptions  # type: ignore[attr-defined]
GradBucket: Any = dist.GradBucket  # type: ignore[attr-defined]
FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
HashStore: Any = dist.HashStore  # type: ignore[attr-defined]
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]

# What BatchNorm1d, 2d, 3d and SyncBatchNorm share; it has no public name. Seen in 2.11, 2.13.
BatchNormBase: Any = torch.nn.modules.batchnorm._BatchNorm


def coalescing() -> Any:
    """Return the groups inside a coalescing block, which puts calls off. No public call tells. Seen in 2.11, 2.13."""
    return c10d._world.pg_coalesce_state


def world_place() -> tuple[dict[str, Any], str, type, str] | None:
    """Return where `GroupMember.WORLD` looks: names of the module, the name there, its type, the attribute of it.

    That property costs as much as the rest of a small call. None where torch keeps the group elsewhere. Seen in 2.13.
    """
    state = c10d._world
    if vars(state).get("_default_pg", dist) is not state.default_pg:
        return None
    return vars(c10d), sys.intern("_world"), type(state), sys.intern("_default_pg")


def gloo(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a Gloo backend. torch makes one only for groups that are called "gloo". Seen in 2.11, 2.13."""
    made = c10d.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
    # torch does this for its own groups; monitored collectives and the flight recorder count on it.
    made._set_sequence_number_for_group()
    return made


def nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return an NCCL backend. torch makes one only for groups that are called "nccl". Seen in 2.11."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = c10d.ProcessGroupNCCL(store, rank, world_size, options)
    made._set_sequence_number_for_group()
    return made


def options(kind: Any, **values: Any) -> Any:
    """Return one of torch's objects of options (`dist.AllreduceOptions`, ...) with ``values`` set that are not None."""
    made = kind()
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    return made


def gather_flat(gloo: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
    """Gather into one tensor. Gloo's public way makes a copy for each rank. Seen in 2.11, 2.13."""
    return gloo._allgather_base(output, tensor, options)


def stand_behind(group: Any, backend: Any) -> None:
    """Let ``backend`` do what torch's C++ code asks ``group`` for without coming to its Python methods.

    Operators of compiled code and of older torch (`all_gather_into_tensor_out`, `c10d::allreduce_`) go to the backend
    that is registered with the group. No public call registers one. Seen in 2.11, 2.13.
    """
    c10d.ProcessGroup._register_backend(group, torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)


def traced_as(made: Any, function: Any) -> None:
    """Let torch.compile read ``function`` where it meets the object ``made``, which is no Python function.

    These are the marks of `torch.jit.script_if_tracing`; the public `torch.compiler.substitute_in_graph` takes only
    functions, and imports the compiler, which takes a second. Seen in 2.13.
    """
    vars(made)["__script_if_tracing_wrapper"] = True
    vars(made)["__original_fn"] = function


def group_named(name: str) -> Any:
    """Return the process group of that name, which is all that an operator can carry. Seen in 2.11, 2.13."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def loader_iterator(frame: FrameType | None, most: int) -> Any:
    """Return the DataLoader's iterator that one of the ``most`` frames from ``frame`` up belongs to, if any does.

    A sampler is not told who draws from it. Seen in 2.11, 2.13.
    """
    for _ in range(most):
        if frame is None:
            return None
        found = frame.f_locals.get("self")
        if isinstance(found, torch.utils.data.dataloader._BaseDataLoaderIter):
            return found
        frame = frame.f_back
    return None


def batches_handed_out(books: dict[str, Any]) -> int:
    """Return how many batches a DataLoader's iterator with these attributes has handed out. Seen in 2.11, 2.13."""
    return int(books["_num_yielded"])


def batches_asked_for(books: dict[str, Any]) -> int:
    """Return how many batches its workers have been asked for; without workers, each is made when it is wanted."""
    return int(books.get("_send_idx", books["_num_yielded"]))


def groups() -> list[Any]:
    """Return every process group of this process. No public call lists them. Seen in 2.11, 2.13."""
    return list(c10d._world.pg_map)


def backends(group: Any) -> list[Any]:
    """Return the backends of ``group``, one for each device type. The public group hides them. Seen in 2.11, 2.13."""
    found = []
    for device in group._device_types:
        try:
            found.append(group._get_backend(torch.device(device)))
        except RuntimeError:
            continue  # A device type that the group names but has no backend for.
    return found


def forget_failed_groups() -> None:
    """Begin to count groups anew. Seen in 2.11, 2.13.

    torch names a default group by how many it tried to form. Ranks on which an earlier one failed before torch
    was asked, and ranks on which it failed in torch, would wait for each other under different names.
    """
    if not dist.is_initialized():
        c10d._world.group_count = 0


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor behind what a functional collective gave, waiting for it; any other as it is.

    torch's own backends are called through its dispatcher, which does this. Seen in 2.11, 2.13.
    """
    if type(tensor) is torch.Tensor:
        return tensor
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.trigger_wait()
        return waited
    return tensor


def premul_factor(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM: a number, a tensor, or None. Only its pickled state has it. Seen in 2.13."""
    state = op.__getstate__()
    return state[1] if isinstance(state, tuple) and len(state) == 2 else None


def profiling() -> bool:
    """Tell whether a profiler watches this thread. No public call tells. Seen in 2.11, 2.13."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def counters(group: Any) -> list[Callable[[], int]]:
    """Return what tells how many operations each backend of ``group`` has begun on this rank.

    No public call tells, and that of the group asks only one of its backends. Raises RuntimeError where one does not
    count. Seen in 2.11, 2.13.
    """
    # One backend may serve several types of device.
    distinct = {id(backend): backend for backend in backends(group)}.values()
    found: list[Callable[[], int]] = [backend._get_sequence_number_for_group for backend in distinct]
    for count in found:
        count()
    return found


_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(cls: _Class) -> _Class:
    """Keep torch.compile out of the methods of ``cls``, which torch's C++ code calls in the middle of compiled code."""
    for function in vars(cls).values():
        if isinstance(function, FunctionType):
            untraced_function(function)
    return cls


def untraced_function(function: Any) -> None:
    """Keep torch.compile out of ``function`` and of all that it calls.

    The public decorator imports the compiler, which takes seconds, and costs each call a wrapper. Seen in 2.11, 2.13.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)


def untraced_frame(function: _Function) -> _Function:
    """Keep torch.compile out of ``function`` itself, but not out of what it calls. Seen in 2.11, 2.13.

    `torch.compiler.disable` imports the compiler, which takes seconds, also where nobody compiles anything.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def queue_callback(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that runs now is over. DDP's own way; seen in 2.11, 2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target. One call for all of them; torch's optimizers use it so. Seen in 2.11, 2.13."""
    if targets:
        torch._foreach_copy_(targets, sources)


def optimizers_in_backward(parameter: torch.Tensor) -> list[Any]:
    """Return the optimizers that step when the gradient of ``parameter`` is there. Seen in 2.11, 2.13.

    `_apply_optimizer_in_backward` leaves them on the parameter for DDP, which steps them after the reduction.
    """
    return list(getattr(parameter, "_in_backward_optimizers", ()))


def take_over_optimizers(parameter: torch.Tensor) -> None:
    """Keep the optimizers of ``parameter`` from stepping before its gradient is reduced. Seen in 2.11, 2.13."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    for handle in module.param_to_optim_hook_handle_map.pop(parameter, []) if module is not None else ():
        handle.remove()


def kept_out(function: Any) -> Any:
    """Keep torch.compile out of ``function`` and all that it calls: the graph breaks there.

    As the public `torch.compiler.disable`, without importing the compiler, which takes seconds. Seen in 2.13.
    """
    function._torchdynamo_disable = True
    untraced_function(function)
    return function


def default_timeout(backend: str) -> timedelta:
    """Return what torch would wait for a collective where the caller says nothing. Seen in 2.11, 2.13."""
    made: timedelta = c10d._get_default_timeout(dist.Backend(backend))
    return made


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the table of the parameters that ``module`` itself holds, as it changes. Seen in 2.11, 2.13.

    The public iterators walk the whole module and take ten times as long, which every forward pass would pay.
    """
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Return the table of the buffers that ``module`` itself holds, as it changes. Seen in 2.11, 2.13."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, Any]:
    """Return the table of the modules directly below ``module``, as it changes. Seen in 2.11, 2.13."""
    return module._modules
