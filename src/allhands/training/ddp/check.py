"""Whether the ranks have the same model, and whether a model is still the one that was wrapped."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ... import _core, _torch
from . import errors
from .model_check import gather_bytes

__all__ = ["Watch", "digest", "same_structure", "same_values"]

# Enough for no two models to be taken for the same one by chance.
_DIGEST_BYTES = 16

# What a reader compares; the whole digest decides.
_SHOWN = 12


def same_structure(
    parameters: Iterable[tuple[str, torch.Tensor]], options: Mapping[str, Any], group: Any, device: torch.device
) -> None:
    """Raise parameters-differ on every rank where the ranks' parameters or options do. All ranks call this."""
    described = {name: _describe(parameter) for name, parameter in parameters}
    described |= {f"argument {name}": str(value) for name, value in options.items()}
    _compare(described, group, device, "ranks wrap different modules", values=False)


def same_values(parameters: Iterable[tuple[str, torch.Tensor]], group: Any, device: torch.device) -> None:
    """Raise parameters-differ on every rank where the ranks' values do. All ranks call this."""
    described = {name: digest(parameter) for name, parameter in parameters}
    _compare(described, group, device, "parameters differ between ranks", values=True)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the bytes of ``tensor``: equal values, bit for bit, have equal ones."""
    here = tensor.detach().cpu().contiguous()
    data = (ctypes.c_char * here.nbytes).from_address(here.data_ptr()) if here.nbytes else b""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _describe(parameter: torch.Tensor) -> str:
    kind = str(parameter.dtype).removeprefix("torch.")
    frozen = "" if parameter.requires_grad else ", frozen"
    strides = "" if parameter.is_contiguous() else f", strides {tuple(parameter.stride())}"
    return f"{kind} {tuple(parameter.shape)}{strides}{frozen}"


def _compare(described: dict[str, str], group: Any, device: torch.device, what: str, *, values: bool) -> None:
    if dist.get_world_size(group) == 1:
        return
    text = json.dumps(list(described.items())).encode()
    summaries = gather_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), group, device)
    if len(set(summaries)) == 1:
        return
    everyone = [json.loads(each) for each in gather_bytes(text, group, device)]
    rows = _rows(everyone, dist.get_process_group_ranks(group), values=values)
    raise errors.differ(dist.get_rank(), what, rows, values=values)


def _rows(
    everyone: Sequence[list[tuple[str, str]]], ranks: Sequence[int], *, values: bool
) -> dict[str, dict[str, list[int]]]:
    """Return which ranks have which value, for each name where they differ."""
    found: dict[str, dict[str, list[int]]] = {}
    tables = [dict(each) for each in everyone]
    for name in dict.fromkeys(name for table in tables for name in table):
        for rank, table in zip(ranks, tables, strict=True):
            value = table.get(name, "missing")
            shown = f"hash {value[:_SHOWN]}" if values and name in table else value
            found.setdefault(name, {}).setdefault(shown, []).append(rank)
    rows = {name: each for name, each in found.items() if len(each) > 1}
    if not rows:
        orders = {tuple(table): number for number, table in enumerate(tables)}
        place = next(index for index, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
        for rank, table in zip(ranks, tables, strict=True):
            rows.setdefault(f"parameter {place}", {}).setdefault([*table][place], []).append(rank)
    return rows


class Watch:
    """Notices that parameters of ``module`` came, went or were replaced since it was made."""

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._parameters = dict(module.named_parameters())
        self._look()

    def _look(self) -> None:
        # For each submodule the tables that torch keeps, and who stood there: comparing them takes a small part of the
        # time that asking the module for its parameters does.
        self._tables = [
            table
            for part in self._module.modules()
            for table in (_torch.own_parameters(part), _torch.own_modules(part))
        ]
        self._stand = _core.inhabitants(self._tables)

    def check(self, rank: int) -> None:
        """Raise module-changed where something changed."""
        if _core.inhabitants(self._tables) != self._stand:
            self._explain(rank)

    def _explain(self, rank: int) -> None:
        now = dict(self._module.named_parameters())
        was = self._parameters
        new = [name for name in now if name not in was and name not in self._ignored]
        gone = [name for name in was if name not in now and name not in self._ignored]
        # Plain tensors are those of torch.func.functional_call, which puts the parameters back afterwards.
        other = [
            name
            for name, each in now.items()
            if name in was and each is not was[name] and name not in self._ignored and isinstance(each, Parameter)
        ]
        if new or gone or other:
            raise errors.changed(rank, new, gone, other)
        # Modules without parameters may come and go.
        self._look()
