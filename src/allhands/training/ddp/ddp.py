"""DistributedDataParallel: the same model on every rank, whose gradients are averaged while backward computes them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Module

from ... import _torch
from ...groups.collectives import require_group
from . import errors, join
from .broadcast_model import Buffers, spread
from .check import Watch, same_structure, same_values
from .ddp_arguments import Arguments
from .reducer import Reducer
from .tensor_tree import moved, tensors_in

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(Module, Joinable):
    """Wraps ``module`` so that each backward pass leaves the average of all ranks' gradients in its parameters.

    The arguments, methods and state dict are those of `torch.nn.parallel.DistributedDataParallel`; docs/architecture.md
    lists what differs. All ranks of the group make it and make the same passes. It works on any backend; on allhands'
    own gradients are averaged where they lie, or with ``gradient_as_bucket_view`` in shared memory.

    Raises parameters-differ where ranks wrap different modules, unused-parameters (from backward, on every rank) where
    a parameter got no gradient, module-changed where parameters came or went, and what ends a group.
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
        # Nothing to do: every parameter is accounted for, copies are always made together, and zeros cost little.
        del check_reduction, batched_grad_copy, skip_all_reduce_unused_params
        require_group("DistributedDataParallel")
        if mixed_precision is not None:
            raise errors.refused(
                "mixed_precision",
                "use torch.autocast for the forward pass; to reduce in 16 bits, register "
                "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
                why="it would put 16-bit copies in the place of parameters between forward and backward, which whoever "
                "holds a parameter meanwhile (hooks, fused optimizers, a second forward pass) sees; torch's own is "
                "for GPUs only",
            )
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise errors.refused("delay_all_reduce_named_params", "leave it out: gradients are reduced as they come")
        given = Arguments.of(module, device_ids, output_device, process_group, device_mesh)
        self.process_group = given.group
        self.device_ids, self.output_device, self.device_type = given.device_ids, given.output_device, given.device_type
        self.is_multi_device_module = given.several_devices
        self.parameters_to_ignore = given.ignored
        self.device = given.device
        self.dim = dim
        self.module = module
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.forward_sync_buffers = (
            forward_sync_buffers
            if forward_sync_buffers is not None
            else broadcast_buffers
            in {
                None,
                True,
            }
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self._caps_bytes = given.caps_bytes(bucket_cap_mb, bucket_cap_mb_list)
        # torch's names for them.
        self.bucket_bytes_cap = self._caps_bytes[-1]
        self.bucket_bytes_cap_list = list(self._caps_bytes) if bucket_cap_mb_list else []
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._comm_hook: tuple[Any, Any] | None = None
        named = self._named()
        if init_sync:
            options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
            options |= {"bucket_cap_mb": self._caps_bytes, "broadcast_buffers": self.forward_sync_buffers}
            same_structure(named.items(), options, self.process_group, self.device)
            everything = forward_sync_buffers is not None or broadcast_buffers is not False
            self.spread_model(0, buffers=everything)
        else:
            same_values(named.items(), self.process_group, self.device)
        self._build()

    def _named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are ours to deal with, each once."""
        return {name: each for name, each in self.module.named_parameters() if name not in self.parameters_to_ignore}

    def _build(self) -> None:
        named = self._named()
        self._watch = Watch(self.module, frozenset(self.parameters_to_ignore))
        self._modules_list = list(self.module.modules())
        self._frozen = [each for each in named.values() if not each.requires_grad]
        sparse = {
            id(part.weight)
            for part in self._modules_list
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        }
        trained = {name: each for name, each in named.items() if each.requires_grad}
        ignored = {id(each) for name, each in self.module.named_buffers() if name in self.parameters_to_ignore}
        self._buffers_kept = Buffers(self._modules_list, ignored)
        self.reducer = Reducer(
            list(trained.values()),
            list(trained),
            [id(each) in sparse for each in trained.values()],
            self.process_group,
            caps_bytes=self._caps_bytes,
            views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            at_the_end=any("SyncBatchNorm" in type(part).__name__ for part in self._modules_list),
        )
        if self._comm_hook is not None:
            self.reducer.averager.state, self.reducer.averager.hook = self._comm_hook
        self._fresh = True

    # A pass ----------------------------------------------------------------------------------------------------------

    @_torch.untraced_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. All ranks call this the same number of times, or inside `join`."""
        inputs, kwargs = self._before(inputs, kwargs)
        return self._after(self.module(*inputs, **kwargs))

    def _before(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        learning = torch.is_grad_enabled()
        if learning:
            self._watch.check(self.reducer.rank)
            if any(each.requires_grad for each in self._frozen):
                # Unfrozen since; each rank does so by itself, because all train the same parameters.
                self._build()
            if self._fresh:
                self._fresh = False
                self.reducer.take_over_optimizers()
        joins = self._join_config.enable
        work = Join.notify_join_context(self) if joins else None
        if work is not None:
            self.reducer.divisor = self._divisor(work)
        if learning:
            self.reducer.rebuild()
        self.sync_buffers()
        if joins:
            join.syncs(self, mine=self.require_backward_grad_sync)
        else:
            self.reducer.divisor = None
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        return inputs, kwargs

    def _divisor(self, work: Any) -> float:
        """Return what sums are divided by inside `join`."""
        if self.divide_by_initial_world_size:
            return float(dist.get_world_size(self.process_group))
        return float(work.get_future().wait()[0])

    def _after(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            return output
        if self.require_forward_param_sync != self.require_backward_grad_sync:
            # Only then: setting an attribute of a module takes 20 us when a pass has filled the caches.
            self.require_forward_param_sync = self.require_backward_grad_sync
        if not self.require_backward_grad_sync:
            self.reducer.rest()
            return output
        found = [each for each in tensors_in(output) if each.requires_grad and not each.is_leaf]
        self.reducer.expect(watched=bool(found))
        for each in found:
            each.register_hook(self.reducer.opens)  # type: ignore[no-untyped-call]
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of passes that begin inside this block to each rank; the next one outside averages them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # Buffers and parameters ------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are those of rank 0 in each pass."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def sync_buffers(self, *, joined: bool = False) -> None:
        """Give everyone the buffers of rank 0, or of a rank that has inputs; nothing where there are none."""
        if not (self.forward_sync_buffers and self.require_forward_param_sync):
            return
        if not self._buffers_kept.now():
            return
        source = join.common_rank(self, candidate=not joined) if self._join_config.enable else 0
        if self.reducer.averager.size > 1:
            self._buffers_kept.send(self.process_group, source)

    def spread_model(self, source: int, *, buffers: bool | None = None) -> None:
        """Give everyone the parameters, and ``buffers`` if they are kept alike, of the rank ``source`` of the group."""
        if dist.get_world_size(self.process_group) == 1:
            return
        tensors = [each for name, each in self.module.named_parameters() if name not in self.parameters_to_ignore]
        if self.forward_sync_buffers if buffers is None else buffers:
            tensors += [each for name, each in self.module.named_buffers() if name not in self.parameters_to_ignore]  # type: ignore[misc]
        spread(tensors, self.process_group, source)

    # Uneven inputs ---------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs.

        Whoever is done takes part in the others' reductions with zeros; at the end all have the model of whoever was
        last. Gradients are divided by the number of all ranks, or of those that have inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs does meanwhile."""
        return join.Shadow(self, divide_by_initial_world_size=bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors by which ranks tell each other that they have inputs."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return self.process_group

    # Hooks -----------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` average the buckets; it returns a future of a tensor like ``bucket.buffer()``.

        The bucket has the methods of torch's GradBucket, and torch's own hooks run unchanged. A hook divides by the
        number of ranks itself.
        """
        Arguments.check_hook(hook, registered=self._comm_hook is not None)
        self._comm_hook = (state, hook)
        self.reducer.averager.state, self.reducer.averager.hook = state, hook

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[kind.name])

    def _set_static_graph(self) -> None:
        if self.reducer.passes:
            raise errors.senseless(
                "_set_static_graph() should be called before training loop starts",
                f"{self.reducer.passes} passes are over",
                "pass static_graph=True",
            )
        self.static_graph = self.reducer.static = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what torch's class tells under the same name, as far as it is known here."""
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
            **({"comm_hook": getattr(self._comm_hook[1], "__qualname__", "")} if self._comm_hook is not None else {}),
        }

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Module, names: Any) -> None:
        """Leave these parameters and buffers of ``module`` to each rank, as torch's class does."""
        vars(module)["_ddp_params_and_buffers_to_ignore"] = names

    # Copies ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise errors.senseless(
                "it cannot be pickled or copied", "it has a group of its own", "pickle ddp.module, and wrap it anew"
            )
        kept = copy.copy(vars(self))
        for name in ("process_group", "reducer", "_watch", "_modules_list", "_frozen", "_buffers_kept"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        require_group("DistributedDataParallel")
        self.process_group = dist.group.WORLD
        self._build()


for _method in (DistributedDataParallel._before, DistributedDataParallel._after):  # noqa: SLF001  # our own
    _torch.untraced_function(_method)

# Libraries ask `isinstance(model, torch.nn.parallel.DistributedDataParallel)` to find the module inside, or the names
# that a checkpoint is to have.
torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
