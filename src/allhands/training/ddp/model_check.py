"""Check that all ranks have the same model, and that a wrapped module still has the parameters it was wrapped with."""

from __future__ import annotations

import ctypes
import hashlib
import json
import operator
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ... import _torch
from ...diagnosis import join, ranks
from ...errors import fail
from ..compare_ranks import gather_text

__all__ = ["ModuleWatch", "check_same_structure", "check_same_values", "digest", "sparse_parameters"]

# 128 bits: two models have the same digest by chance with a probability of 2**-64 at most.
_DIGEST_BYTES = 16

# A message names at most this many parameters and counts the others.
_MAX_NAMES = 12

# Hexadecimal digits in messages; the whole digest is compared.
_SHOWN = 12


def check_same_structure(parameters: Mapping[str, torch.Tensor], options: Mapping[str, Any], group: Any) -> None:
    """Raise parameters-differ on every rank if parameters or options differ between ranks. All ranks call this."""
    described = {name: _describe(parameter) for name, parameter in parameters.items()}
    described |= {f"argument {name}": str(value) for name, value in options.items()}
    _compare(parameters, described, group, "ranks wrap different modules", values=False)


def check_same_values(parameters: Mapping[str, torch.Tensor], group: Any) -> None:
    """Raise parameters-differ on every rank if values differ between ranks. All ranks call this."""
    described = {name: digest(parameter) for name, parameter in parameters.items()}
    _compare(parameters, described, group, "parameters differ between ranks", values=True)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the values of ``tensor``, bit for bit; strides and device do not matter."""
    here = tensor.detach().cpu().contiguous()
    data = (ctypes.c_char * here.nbytes).from_address(here.data_ptr()) if here.nbytes else b""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _describe(parameter: torch.Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    frozen = "" if parameter.requires_grad else ", frozen"
    strides = "" if parameter.is_contiguous() else f", strides {tuple(parameter.stride())}"
    return f"{dtype} {tuple(parameter.shape)}{strides}{frozen}"


def _compare(
    parameters: Mapping[str, torch.Tensor], described: Mapping[str, str], group: Any, what: str, *, values: bool
) -> None:
    if dist.get_world_size(group) == 1:
        return
    device = next(iter(parameters.values())).device
    text = json.dumps(list(described.items()))
    summary = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    if len(set(gather_text(summary, group, device))) == 1:
        return
    tables = [json.loads(each) for each in gather_text(text, group, device)]
    rows = _differences(tables, dist.get_process_group_ranks(group), values=values)
    lines = [
        f"{name}: " + ", ".join(f"{value} on {ranks(where)}" for value, where in found.items())
        for name, found in list(rows.items())[:_MAX_NAMES]
    ]
    if len(rows) > _MAX_NAMES:
        lines.append(f"and {len(rows) - _MAX_NAMES} more")
    raise fail(
        "parameters-differ",
        what,
        who=f"rank {dist.get_rank()} ({socket.gethostname()}, pid {os.getpid()})",
        why="\n".join(lines),
        fix="give every rank the same values: seed each rank alike before the model is made, load the same checkpoint, "
        "or use init_sync=True (the default), which broadcasts those of rank 0"
        if values
        else "build the same module with the same arguments on every rank",
    )


def _differences(
    tables: Sequence[list[tuple[str, str]]], members: Sequence[int], *, values: bool
) -> dict[str, dict[str, list[int]]]:
    """Return, for each name whose value differs, which ranks have which value."""
    found: dict[str, dict[str, list[int]]] = {}
    by_rank = [dict(each) for each in tables]
    for name in dict.fromkeys(name for table in by_rank for name in table):
        for rank, table in zip(members, by_rank, strict=True):
            value = table.get(name, "missing")
            shown = f"hash {value[:_SHOWN]}" if values and name in table else value
            found.setdefault(name, {}).setdefault(shown, []).append(rank)
    rows = {name: each for name, each in found.items() if len(each) > 1}
    if not rows:
        # The same parameters in another order: report the first position that differs.
        orders = [[*table] for table in by_rank]
        index = next(index for index, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
        for rank, order in zip(members, orders, strict=True):
            rows.setdefault(f"parameter {index}", {}).setdefault(order[index], []).append(rank)
    return rows


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Return the ids of the parameters of ``modules`` whose gradients are sparse."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(part.weight) for part in modules if isinstance(part, embeddings) and part.sparse}


class ModuleWatch:
    """Detects that parameters of ``module`` were added, removed or replaced since it was wrapped."""

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._parameters = self._named()
        self._record()

    def _named(self) -> dict[str, Parameter]:
        return {name: each for name, each in self._module.named_parameters() if name not in self._ignored}

    def _record(self) -> None:
        # torch's own tables of each submodule: comparing them is faster than `Module.named_parameters` in every pass.
        self._tables = [
            table
            for part in self._module.modules()
            for table in (_torch.own_parameters(part), _torch.own_modules(part))
        ]
        # References, not ids: the id of an object that was freed can be reused.
        self._values = self._present()

    def _present(self) -> list[Any]:
        return list(chain.from_iterable(table.values() for table in self._tables))

    def check(self, rank: int) -> None:
        """Raise module-changed if a parameter was added, removed or replaced."""
        present = self._present()
        if len(present) == len(self._values) and all(map(operator.is_, present, self._values)):
            return
        now, was = self._named(), self._parameters
        new, gone = [name for name in now if name not in was], [name for name in was if name not in now]
        # torch.func.functional_call replaces parameters by plain tensors during a call.
        others = [name for name, each in now.items() if each is not was.get(name) and isinstance(each, Parameter)]
        replaced = [name for name in others if name in was]
        if new or gone or replaced:
            lines = []
            for change, names in (("new", new), ("gone", gone), ("replaced", replaced)):
                more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
                lines += [f"{change}: {join([*names[:_MAX_NAMES], *more])}"] if names else []
            raise fail(
                "module-changed",
                "the module was changed after it was wrapped",
                who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
                why="\n".join(lines)
                + "\n(observed: the module's parameters are not those of which gradients are averaged)",
                fix="change the module first, then wrap it; or wrap the changed module anew",
                ranks=(rank,),
            )
        # Submodules without parameters may be added and removed.
        self._record()
