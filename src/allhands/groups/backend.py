"""The process group that torch calls `allhands`: picks an engine for each call and stages its tensors.

CPU tensors go to the group's engine (`engines.shm`, `hierarchical`, `gloo`), CUDA tensors to an engine of their device
(`cuda_route`) or, where there is none, through host memory. Sparse tensors are left to Gloo.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .. import _core, _torch
from ..engines.base import Engine, parts_of
from ..engines.dtypes import dtype_code
from ..engines.gloo.engine import GlooEngine
from ..engines.hierarchical import engine as hierarchical
from ..engines.mpi import library as mpi
from ..engines.mpi.engine import MpiEngine
from ..engines.shm import engine as shm
from ..engines.shm.fd_passing import Apart
from . import engine_choice, lifecycle
from . import session as _session
from .process_group import HostGroup, MultiHostGroup, Route
from .staging import Staged, StagedList, extents
from .staging import dense as _dense

__all__ = ["Group", "WideGroup", "create"]

_Tensors = Sequence[torch.Tensor]


def create(options: Any, pg_options: Any) -> Any:
    """Make one group; torch calls this through `registration`.

    Inside `allhands.init_process_group` the roll call has been held. Where torch's own
    `init_process_group("allhands")` was called it is held here, and the ranks meet by torch's store.
    """
    del pg_options  # Neither engine takes any.
    store, rank, size = options.store, options.group_rank, options.group_size
    session = _session.current()
    if not options.global_ranks_in_group and not lifecycle.forming():
        # torch forms a default group by itself. A session that is left over belongs to one that it destroyed.
        lifecycle.end(wait_s=0.0)
        session = lifecycle.attend(store, rank, size, options.timeout)
        store = session.store
    elif options.global_ranks_in_group and session is not None:
        # torch's own store where torch formed the default group; on ours, connections can be closed.
        store = PrefixStore(f"{options.group_id}/", session.store)
    gloo = _torch.gloo(store, rank, size, options.timeout)
    if session is None:
        return gloo
    ranks = list(options.global_ranks_in_group) or list(range(size))
    engine_name = engine_choice.chosen(store, rank)
    engine = _engine(
        engine_name, store, gloo, rank, ranks, group=options.group_id, session=session, timeout=options.timeout
    )
    kind = Group if engine.capabilities.one_host else WideGroup
    return kind(rank, ranks, engine=engine, gloo=gloo, session=session, timeout=options.timeout, store=store)


def _engine(  # what a group is
    name: str,
    store: Store,
    gloo: Any,
    rank: int,
    ranks: list[int],
    *,
    group: str,
    session: _session.Session,
    timeout: timedelta,
) -> Engine:
    """Make the engine that fits the ranks of a group, Gloo's where that is ``name``; each of them calls this."""
    size, check = len(ranks), session.member.check
    if name == "mpi":
        deadline = time.monotonic() + timeout.total_seconds()
        world = mpi.join(
            session.member.rank,
            session.member.world_size,
            subset=size < session.member.world_size,
            deadline=deadline,
            check=check,
        )
        comm = world.communicator(store, rank, ranks, group, deadline=deadline, check=check)
        return MpiEngine(world, comm, gloo, rank, ranks)
    if name == "gloo" or (session.one_host and size > shm.MAX_RANKS):
        return GlooEngine(gloo, rank, ranks)
    if session.one_host:
        # Ranks of one machine that cannot share memory (containers) count as ranks of different hosts.
        with suppress(Apart):
            return shm.form(store, rank, size, timeout.total_seconds(), check)
    address = session.connections.address or session.own_address
    return hierarchical.form(store, gloo, rank, ranks, address=address, timeout_s=timeout.total_seconds(), check=check)


@_torch.untraced
class Group(HostGroup):
    """The collectives of a group on one host. The methods are those that torch calls; all ranks call the same ones."""

    # Collectives -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _torch.options(dist.AllreduceOptions, reduceOp=opts, timeout=timeout)
        return self._reduce_each("all_reduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce several tensors to all ranks, adjacent ones of one type as one."""
        return self._reduce_each("all_reduce", tensors, opts or dist.AllreduceCoalescedOptions())

    def _reduce_each(self, name: str, tensors: list[torch.Tensor], opts: Any) -> Any:
        if not _dense(*tensors):
            return self._sparse(name, tensors, opts, can=True)
        route = self._route(tensors)

        def run(timeout_ns: int) -> None:
            for _, alike in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
                self._reduce_alike(name, list(alike), opts.reduceOp, route, timeout_ns)

        return self._do(name, run, tensors, opts, route)

    def _reduce_alike(
        self, name: str, tensors: list[torch.Tensor], op: Any, route: Route, timeout_ns: int
    ) -> None:  # what a reduction is
        """Reduce tensors of one type to all ranks."""
        dtype, reduction, factor = self._reduction(name, tensors[0], op)
        if len(tensors) > 1 and route.engine.capabilities.tensor_lists and _core.disjoint(extents(tensors)):
            with StagedList(tensors, factor=factor, device=route.device) as flats:
                route.engine.all_reduce_list(flats.places, dtype, reduction, timeout_ns)
            return
        for tensor in tensors:
            with Staged(tensor, factor=factor, device=route.device) as flat:
                route.engine.all_reduce(*flat.place, dtype, reduction, timeout_ns)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce to the root."""
        opts = opts or dist.ReduceOptions()
        if not _dense(*tensors):
            return self._sparse("reduce", tensors, opts)
        route = self._route(tensors)

        def run(timeout_ns: int) -> None:
            for tensor in tensors:
                dtype, reduction, factor = self._reduction("reduce", tensor, opts.reduceOp)
                with Staged(tensor, back=self._rank == opts.rootRank, factor=factor, device=route.device) as flat:
                    route.engine.reduce(*flat.place, dtype, reduction, opts.rootRank, timeout_ns)

        return self._do("reduce", run, tensors, opts, route)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _torch.options(dist.BroadcastOptions, rootRank=opts, timeout=timeout)
        opts = opts or dist.BroadcastOptions()
        if not _dense(*tensors):
            return self._sparse("broadcast", tensors, opts)
        route = self._route(tensors)

        def run(timeout_ns: int) -> None:
            for tensor in tensors:
                with Staged(tensor, back=self._rank != opts.rootRank, device=route.device) as flat:
                    code = dtype_code(tensor.dtype)
                    route.engine.broadcast(*flat.place, code, opts.rootRank, timeout_ns)

        return self._do("broadcast", run, tensors, opts, route)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensor of each rank to all ranks, as a list."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts or _torch.AllgatherOptions()
        if not _dense(*inputs, *(tensor for each in outputs for tensor in each)):
            return self._sparse("all_gather", inputs, opts)
        route = self._route(inputs)

        def run(timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._gather_into(output, tensor, route, timeout_ns)

        return self._do("all_gather", run, [tensor for each in outputs for tensor in each], opts, route)

    def _gather_into(self, outputs: _Tensors, tensor: torch.Tensor, route: Route, timeout_ns: int) -> None:
        self._same_number("all_gather", outputs)
        self._same_type("all_gather", tensor, *outputs)
        with Staged(tensor, back=False, device=route.device) as flat, StagedList(outputs, device=route.device) as out:
            route.engine.all_gather(*flat.place, out.places, dtype_code(tensor.dtype), timeout_ns)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Copy the tensor of each rank to all ranks, as one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy several tensors of each rank to all ranks, each as one tensor."""
        opts = opts or _torch.AllgatherOptions()
        if not _dense(*outputs, *inputs):
            return self._sparse("all_gather_into_tensor", inputs, opts)
        route = self._route(inputs)

        def run(timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with Staged(output, device=route.device) as flat:
                    self._gather_into(self._equal_parts(flat.tensor), tensor, route, timeout_ns)

        return self._do("all_gather_into_tensor", run, outputs, opts, route)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy several tensors of each rank to all ranks, as lists."""
        # outputs[rank][index] here, where allgather has outputs[index][rank].
        turned = [[each[index] for each in outputs] for index in range(len(inputs))]
        return self.allgather(turned, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensor of each rank to the root."""
        opts = opts or dist.GatherOptions()
        if not _dense(*inputs, *(tensor for each in outputs for tensor in each)):
            return self._sparse("gather", inputs, opts)
        route = self._route(inputs)

        def run(timeout_ns: int) -> None:
            code = dtype_code(inputs[0].dtype)
            with Staged(inputs[0], back=False, device=route.device) as flat:
                if self._rank != opts.rootRank:
                    route.engine.gather(*flat.place, None, code, opts.rootRank, timeout_ns)
                    return
                self._same_number("gather", outputs[0])
                with StagedList(outputs[0], device=route.device) as out:
                    route.engine.gather(*flat.place, out.places, code, opts.rootRank, timeout_ns)

        return self._do("gather", run, [tensor for each in outputs for tensor in each], opts, route)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy to each rank its tensor of the root's list."""
        opts = opts or dist.ScatterOptions()
        if not _dense(*outputs, *(tensor for each in inputs for tensor in each)):
            return self._sparse("scatter", outputs, opts)
        route = self._route(outputs)

        def run(timeout_ns: int) -> None:
            code = dtype_code(outputs[0].dtype)
            with Staged(outputs[0], device=route.device) as flat:
                if self._rank != opts.rootRank:
                    route.engine.scatter(None, *flat.place, code, opts.rootRank, timeout_ns)
                    return
                self._same_number("scatter", inputs[0])
                with StagedList(inputs[0], back=False, device=route.device) as given:
                    route.engine.scatter(given.places, *flat.place, code, opts.rootRank, timeout_ns)

        return self._do("scatter", run, outputs, opts, route)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce each tensor of the list to the rank it is for."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts or dist.ReduceScatterOptions()
        if not _dense(*outputs, *(tensor for each in inputs for tensor in each)):
            return self._sparse("reduce_scatter", outputs, opts)
        route = self._route(outputs)

        def run(timeout_ns: int) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_into(output, given, opts.reduceOp, route, timeout_ns)

        return self._do("reduce_scatter", run, outputs, opts, route)

    def _reduce_into(
        self, output: torch.Tensor, inputs: _Tensors, op: Any, route: Route, timeout_ns: int
    ) -> None:  # what a reduction is
        self._same_number("reduce_scatter", inputs)
        self._same_type("reduce_scatter", output, *inputs)
        dtype, reduction, factor = self._reduction("reduce_scatter", output, op)
        if inputs[self._rank].numel() != output.numel():
            raise self._invalid("reduce_scatter", "this rank's tensor of the list and the output differ in size")
        if any(tensor.numel() != output.numel() for tensor in inputs):
            self._reduce_uneven(output, inputs, dtype, reduction, factor, route, timeout_ns)
            return
        with (
            Staged(output, device=route.device) as flat,
            StagedList(inputs, back=False, factor=factor, device=route.device) as given,
        ):
            route.engine.reduce_scatter(given.places, *flat.place, dtype, reduction, timeout_ns)

    def _reduce_uneven(  # noqa: PLR0917  # what a reduction is
        self,
        output: torch.Tensor,
        inputs: _Tensors,
        dtype: int,
        reduction: int,
        factor: complex | None,
        route: Route,
        timeout_ns: int,
    ) -> None:
        output.copy_(inputs[self._rank].reshape(output.shape))
        for root, tensor in enumerate(inputs):
            mine = root == self._rank
            with Staged(output if mine else tensor, back=mine, factor=factor, device=route.device) as flat:
                route.engine.reduce(*flat.place, dtype, reduction, root, timeout_ns)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce each part of one tensor to the rank it is for."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Reduce each part of several tensors to the rank it is for."""
        opts = opts or dist.ReduceScatterOptions()
        if not _dense(*outputs, *inputs):
            return self._sparse("reduce_scatter_tensor", outputs, opts)
        route = self._route(outputs)

        def run(timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with Staged(tensor, back=False, device=route.device) as flat:
                    self._reduce_into(output, self._equal_parts(flat.tensor), opts.reduceOp, route, timeout_ns)

        return self._do("reduce_scatter_tensor", run, outputs, opts, route)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Copy to each rank its tensor of the list."""
        opts = opts or dist.AllToAllOptions()
        if not _dense(*outputs, *inputs):
            return self._sparse("all_to_all", outputs, opts)
        self._same_number("all_to_all", outputs)
        self._same_number("all_to_all", inputs)
        route = self._route(inputs)

        def run(timeout_ns: int) -> None:
            with (
                StagedList(outputs, device=route.device) as out,
                StagedList(inputs, back=False, device=route.device) as given,
            ):
                code = dtype_code(inputs[0].dtype)
                route.engine.all_to_all(given.places, out.places, code, timeout_ns)

        return self._do("all_to_all", run, outputs, opts, route)

    def all_to_all_single(  # torch's signature
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Copy to each rank its part of one tensor; splits are in rows, [] for even ones."""
        opts = opts or dist.AllToAllOptions()
        if not _dense(output, tensor):
            return self._sparse("all_to_all_single", [output], opts)
        route = self._route([output, tensor])

        def run(timeout_ns: int) -> None:
            with Staged(output, device=route.device) as out, Staged(tensor, back=False, device=route.device) as given:
                code = dtype_code(tensor.dtype)
                parts = (
                    parts_of(self._rows(given.tensor, input_splits)),
                    parts_of(self._rows(out.tensor, output_splits)),
                )
                route.engine.all_to_all(*parts, code, timeout_ns)

        return self._do("all_to_all_single", run, [output], opts, route)

    def _rows(self, tensor: torch.Tensor, splits: list[int]) -> _Tensors:
        size, rows = self.size(), tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise self._invalid("all_to_all_single", f"{rows} rows cannot be split evenly among {size} ranks")
            splits = [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise self._invalid("all_to_all_single", f"splits {splits} do not add up to {rows} rows for {size} ranks")
        return list(torch.split(tensor, splits))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        opts = opts or dist.BarrierOptions()
        return self._do("barrier", self.engine.barrier, [], opts)

    # Older names, which older versions of torch and its C++ code call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class WideGroup(MultiHostGroup, Group):
    """The collectives of a group on several hosts."""
