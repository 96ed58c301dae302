"""DistributedDataParallel: one model on all ranks, whose gradients are averaged during backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ... import _torch
from ...errors import AllhandsError, fail
from ...groups.collectives import require_group
from .model_check import ModuleWatch, check_same_structure, check_same_values, sparse_parameters
from .reducer import Reducer, all_reduce, broadcast

__all__ = [
    "DistributedDataParallel",
    "caps_bytes",
    "checked_parameters",
    "find_tensors",
    "invalid_argument",
    "map_leaves",
]

# torch's default of bucket_cap_mb: large enough for the engine's full bandwidth, small enough to overlap with backward.
_CAP_MIB = 25.0

# torch's size of the first bucket: small, so that the first reduction starts early in backward.
_FIRST_BYTES = 1 << 20

# Tensors of at least this many bytes are broadcast by themselves, without a copy; smaller ones are copied into one flat
# tensor, because the latency of a broadcast of few bytes is about the time that this many take.
_LARGE_BYTES = 1 << 18

# Start of each tensor in the flat one: a multiple of every dtype's size.
_ALIGNMENT = 16


class DistributedDataParallel(Module, Joinable):
    """Wraps ``module`` so that each backward pass leaves the average of all ranks' gradients in its parameters.

    The arguments, methods and state dict are those of `torch.nn.parallel.DistributedDataParallel`; docs/architecture.md
    lists the differences. All ranks of the group make it and run the same passes. It works on any backend; on allhands'
    own, gradients are averaged in their own memory, or with ``gradient_as_bucket_view`` in shared memory.

    Raises parameters-differ if ranks wrap different modules, unused-parameters (from backward, on every rank) if a
    parameter got no gradient, module-changed if parameters were added or removed, and the errors of collectives.
    """

    def __init__(  # noqa: PLR0917  # torch's signature
        self,
        module: Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        # No effect here: gradients are always checked and copied together, and reducing zeros costs little.
        del check_reduction, batched_grad_copy, skip_all_reduce_unused_params
        require_group("DistributedDataParallel")
        if mixed_precision is not None:
            raise invalid_argument(
                "mixed_precision is not supported",
                "it would replace parameters by 16-bit copies between forward and backward, which is visible to code "
                "that holds a parameter meanwhile (hooks, fused optimizers, a second forward pass); torch's own is "
                "for GPUs only",
                "use torch.autocast for the forward pass; to reduce in 16 bits, register "
                "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
            )
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise invalid_argument(
                "delay_all_reduce_named_params is not supported",
                "",
                "leave it out: gradients are reduced when their bucket is complete",
            )
        named = checked_parameters(module)
        devices = {each.device for each in named.values()}
        self.device_ids, self.output_device = _one_device(device_ids, output_device, devices)
        self.process_group = _one_group(process_group, device_mesh)
        self.device = next(iter(named.values())).device
        self.device_type = self.device.type
        self.is_multi_device_module = len(devices) > 1
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.dim = dim
        self.module = module
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        # Two names of one argument; only the older one also prevents the first broadcast.
        sync_buffers_once = forward_sync_buffers is not None or broadcast_buffers is not False
        self.forward_sync_buffers = sync_buffers_once if forward_sync_buffers is None else forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self._caps_bytes = caps_bytes(bucket_cap_mb, bucket_cap_mb_list)
        # Attributes of torch's class.
        self.bucket_bytes_cap = self._caps_bytes[-1]
        self.bucket_bytes_cap_list = list(self._caps_bytes) if bucket_cap_mb_list else []
        if device_mesh is not None:
            self.device_mesh = device_mesh
        # The state and the function of `register_comm_hook`.
        self._comm_hook: tuple[Any, Any] = (None, None)
        if init_sync:
            options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
            options |= {"bucket_cap_mb": self._caps_bytes, "broadcast_buffers": self.forward_sync_buffers}
            check_same_structure(named, options, self.process_group)
            self.broadcast_model(0, buffers=sync_buffers_once)
        else:
            check_same_values(named, self.process_group)
        self._build()

    def _build(self) -> None:
        named = checked_parameters(self.module)
        self._watch = ModuleWatch(self.module, frozenset(self.parameters_to_ignore))
        self._modules_list = list(self.module.modules())
        self._frozen = [each for each in named.values() if not each.requires_grad]
        buffers = self.module.named_buffers()
        self._ignored_buffers = {id(each) for name, each in buffers if name in self.parameters_to_ignore}
        self.reducer = Reducer(
            {name: each for name, each in named.items() if each.requires_grad},
            sparse_parameters(self._modules_list),
            self.process_group,
            caps_bytes=self._caps_bytes,
            views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            # SyncBatchNorm issues collectives during backward: the order must not depend on which gradients a rank has.
            at_the_end=self.find_unused_parameters
            and any("SyncBatchNorm" in type(m).__name__ for m in self._modules_list),
        )
        self.reducer.averager.state, self.reducer.averager.hook = self._comm_hook

    # A pass ----------------------------------------------------------------------------------------------------------

    @_torch.untraced_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. All ranks call this the same number of times, or inside `join`."""
        inputs, kwargs = self._before(inputs, kwargs)
        return self._after(self.module(*inputs, **kwargs))

    def _before(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled:
            self._watch.check(self.reducer.rank)
            if any(each.requires_grad for each in self._frozen):
                # A parameter was unfrozen. No communication is needed: all ranks train the same parameters.
                self._build()
            if not self.reducer.passes:
                self.reducer.take_over_optimizers()
        joins = self._join_config.enable
        work = Join.notify_join_context(self) if joins else None
        if work is not None:
            ranks = self.reducer.averager.size if self.divide_by_initial_world_size else work.get_future().wait()[0]
            self.reducer.divisor = float(ranks)
        if grad_enabled:
            self.reducer.rebuild()
        self.sync_buffers()
        if joins:
            _highest(self, self.require_backward_grad_sync)
        else:
            self.reducer.divisor = None
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = map_leaves(
                lambda each: each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each,
                (inputs, kwargs),
            )
        return inputs, kwargs

    def _after(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            return output
        if self.require_forward_param_sync != self.require_backward_grad_sync:
            # Setting an attribute of a module takes 20 us with cold caches, so only if it changes.
            self.require_forward_param_sync = self.require_backward_grad_sync
        if not self.require_backward_grad_sync:
            self.reducer.prepare(armed=False)
            return output
        watched = [each for each in find_tensors(output) if each.requires_grad and not each.is_leaf]
        # Without one, the first gradient starts the pass.
        self.reducer.prepare(armed=True, synchronized=not watched)
        for each in watched:
            each.register_hook(self.reducer.on_output_gradient)  # type: ignore[no-untyped-call]
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of passes that begin inside this block local; the next pass outside averages the sums."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # Buffers and parameters ------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Whether the buffers of rank 0 are broadcast in each pass."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def sync_buffers(self, *, joined: bool = False) -> None:
        """Broadcast the buffers of rank 0, inside `join` of a rank that has inputs."""
        if not (self.forward_sync_buffers and self.require_forward_param_sync):
            return
        # torch's tables of each submodule: faster than `Module.named_buffers` in every pass.
        tables = map(_torch.own_buffers, self._modules_list)
        found = {id(each): each for table in tables for each in table.values() if each is not None}
        buffers = [each for key, each in found.items() if key not in self._ignored_buffers]
        if not buffers:
            return
        source = _highest(self, -1 if joined else self.process_group.rank()) if self._join_config.enable else 0
        if self.reducer.averager.size > 1:
            _broadcast_coalesced(buffers, self.process_group, source)

    def broadcast_model(self, source: int, *, buffers: bool) -> None:
        """Broadcast the parameters, and with ``buffers`` the buffers, of the group rank ``source``."""
        if dist.get_world_size(self.process_group) == 1:
            return
        tensors: list[torch.Tensor] = list(checked_parameters(self.module).values())
        if buffers:
            tensors += [each for name, each in self.module.named_buffers() if name not in self.parameters_to_ignore]
        _broadcast_coalesced(tensors, self.process_group, source)

    # Uneven inputs ---------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs.

        A rank without inputs contributes zeros to the reductions of the others; at the end all ranks get the model of a
        rank that finished last. Sums are divided by the number of all ranks, or of those that have inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for a rank without inputs; `torch.distributed.algorithms.Join` calls this."""
        self.divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return _DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors by which ranks count those with inputs."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return self.process_group

    # Hooks -----------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Average buckets with ``hook(state, bucket)``, which returns a future of a tensor like ``bucket.buffer()``.

        The bucket has the methods of torch's GradBucket, and torch's own hooks run unchanged. A hook divides by the
        number of ranks itself.
        """
        _check_hook(hook, registered=self._comm_hook[1] is not None)
        self._comm_hook = self.reducer.averager.state, self.reducer.averager.hook = state, hook

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[kind.name])

    def _set_static_graph(self) -> None:
        if self.reducer.passes:
            raise invalid_argument(
                "_set_static_graph() should be called before training loop starts",
                f"{self.reducer.passes} passes are over",
                "pass static_graph=True",
            )
        self.static_graph = self.reducer.static = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the data of torch's method of this name that apply here."""
        return {
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(),
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "bucket_cap_bytes": self._caps_bytes[-1],
            "bucket_sizes": ", ".join(
                str(bucket.flat.nbytes) for bucket in self.reducer.buckets if bucket.flat is not None
            ),
            "num_parameter_tensors": len(self.reducer.parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in self.reducer.parameters),
            "has_rebuilt_buckets": int(self.reducer.rebuilt),
            "iteration": self.reducer.passes,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "in_shared_memory": int(self.reducer.in_segment),
            **({"comm_hook": getattr(hook, "__qualname__", "")} if (hook := self._comm_hook[1]) is not None else {}),
        }

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Module, names: Any) -> None:
        """Keep these parameters and buffers of ``module`` local to each rank, as torch's class does."""
        vars(module)["_ddp_params_and_buffers_to_ignore"] = names

    # Copies ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise invalid_argument(
                "it cannot be pickled or copied", "it has a group of its own", "pickle ddp.module, and wrap it anew"
            )
        state = copy.copy(vars(self))
        for name in ("process_group", "reducer", "_watch", "_modules_list", "_frozen", "_ignored_buffers"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        require_group("DistributedDataParallel")
        self.process_group = dist.group.WORLD
        self._build()


for _method in (DistributedDataParallel._before, DistributedDataParallel._after):  # noqa: SLF001  # our own
    _torch.untraced_function(_method)

# Libraries use `isinstance(model, torch.nn.parallel.DistributedDataParallel)` to find the module inside, or the names
# for a checkpoint.
torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)


class _DDPJoinHook(JoinHook):
    """Issues the collectives of a forward and backward pass, in the same order, on a rank without inputs."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Take part in one pass of the ranks that have inputs."""
        ddp = self._ddp
        ddp.reducer.rebuild()
        ddp.sync_buffers(joined=True)
        ddp.require_forward_param_sync = bool(_highest(ddp, 0))
        if ddp.require_forward_param_sync:
            # This rank contributes zeros; it divides them only to issue the same collectives.
            ddp.reducer.divisor = float(ddp.reducer.averager.size)
            ddp.reducer.reduce_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receive the model of a rank that finished last."""
        ddp = self._ddp
        ddp.reducer.divisor = None
        source = _highest(ddp, ddp.process_group.rank() if is_last_joiner else -1)
        ddp.broadcast_model(source, buffers=ddp.forward_sync_buffers)


def _highest(ddp: DistributedDataParallel, mine: int) -> int:
    """Return the highest number of all ranks of ``ddp``, which all call this."""
    found = torch.tensor([int(mine)], device=ddp.device)
    all_reduce(found, dist.ReduceOp.MAX, ddp.process_group)
    return int(found)


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses, which modules may return."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        yield from find_tensors(each)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with the leaves of its lists, tuples and dicts replaced by ``function`` of them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(function, each) for each in value)
    if isinstance(value, dict):
        found = copy.copy(value)
        for name, each in value.items():
            found[name] = map_leaves(function, each)
        return found
    return function(value)


@torch.no_grad()
def _broadcast_coalesced(tensors: Iterable[torch.Tensor], group: Any, source: int) -> None:
    """Broadcast ``tensors`` from the rank ``source`` of ``group``. All ranks call this."""
    small: dict[torch.device, list[torch.Tensor]] = {}
    for each in tensors:
        if each.nbytes >= _LARGE_BYTES and each.is_contiguous():
            broadcast(each.detach(), group_src=source, group=group)
        elif each.numel():
            small.setdefault(each.device, []).append(each.detach())
    sends = group.rank() == source
    for device, found in small.items():
        sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in found]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        views = [
            part[: each.nbytes].view(each.dtype).view(each.shape)
            for part, each in zip(torch.split(flat, sizes), found, strict=True)
        ]
        if sends:
            _torch.foreach_copy(views, found)
        broadcast(flat, group_src=source, group=group)
        if not sends:
            _torch.foreach_copy(found, views)


# Arguments ---------------------------------------------------------------------------------------------------------


def invalid_argument(problem: str, why: str, fix: str) -> AllhandsError:
    """An argument is not supported or makes no sense."""
    return fail("invalid-argument", f"DistributedDataParallel: {problem}", who="this rank", why=why, fix=fix)


def checked_parameters(module: Module) -> dict[str, torch.nn.Parameter]:
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


def _one_device(device_ids: Any, output_device: Any, found: set[torch.device]) -> tuple[list[int] | None, int | None]:
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


def _one_group(process_group: Any, device_mesh: Any) -> Any:
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


def _check_hook(hook: Callable[..., Any], *, registered: bool) -> None:
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
