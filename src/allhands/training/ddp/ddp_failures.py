"""Compose the errors of DistributedDataParallel. Pure: the callers detect the failure."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import torch

from ...diagnosis import join, ranks
from ...errors import AllhandsError, fail

__all__ = [
    "backward_unfinished",
    "gradient_twice",
    "graph_changed",
    "invalid_argument",
    "module_changed",
    "parameter_changed",
    "parameters_differ",
    "unused_parameters",
]

# A message names at most this many parameters and counts the others.
_MAX_NAMES = 12


def _this_rank(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"


def unused_parameters(rank: int, where: Mapping[str, Sequence[int]], *, static: bool) -> AllhandsError:
    """Parameters got no gradient; ``where`` has the ranks of each name."""
    lines = [f"{name} on {ranks(found)}" for name, found in list(where.items())[:_MAX_NAMES]]
    if len(where) > len(lines):
        lines.append(f"and {len(where) - len(lines)} more parameters")
    number = f"{len(where)} parameters" if len(where) > 1 else "a parameter"
    if static:
        what = f"{number} that had a gradient in the first backward pass got none"
        fix = "leave out static_graph=True where the graph changes"
    else:
        what = f"{number} got no gradient"
        fix = (
            "use every parameter in the loss, freeze those that are not used (requires_grad_(False) before wrapping), "
            "or pass find_unused_parameters=True"
        )
    return fail(
        "unused-parameters",
        f"{what} in this backward pass",
        who=_this_rank(rank),
        why="there is no gradient of\n" + "\n".join(lines),
        fix=fix,
        ranks=tuple(sorted({each for found in where.values() for each in found})),
    )


def gradient_twice(rank: int, name: str, *, static: bool) -> AllhandsError:
    """A gradient arrived again after its bucket was complete."""
    return fail(
        "gradient-twice",
        f"{name} got a gradient again after its bucket was complete",
        who=_this_rank(rank),
        why="a backward pass inside this one computed it: activation checkpointing with use_reentrant=True that uses "
        "the parameter several times, or a call of backward() in a hook",
        fix="leave out static_graph=True where the graph changes, or checkpoint with use_reentrant=False"
        if static
        else "checkpoint with use_reentrant=False; or pass static_graph=True if every pass uses the same parameters",
        ranks=(rank,),
    )


def graph_changed(rank: int, name: str) -> AllhandsError:
    """A parameter of a static graph got a gradient that it did not get in the first pass."""
    return fail(
        "gradient-twice",
        f"{name} got a gradient, although it had none in the first backward pass",
        who=_this_rank(rank),
        why="static_graph=True promises that every backward pass uses the same parameters",
        fix="leave out static_graph=True; find_unused_parameters=True allows for what changes",
        ranks=(rank,),
    )


def backward_unfinished(rank: int, ready: int, buckets: int) -> AllhandsError:
    """An exception ended the last backward pass between its reductions."""
    return fail(
        "backward-unfinished",
        f"the last backward pass stopped after {ready} of {buckets} buckets were complete",
        who=_this_rank(rank),
        why="an exception ended it and was caught, while the other ranks wait for its other gradients: any further "
        "reduction would mix gradients of different passes",
        fix="do not catch exceptions around backward() on single ranks; let them end the job, or destroy the group "
        "and form a new one on all ranks",
        ranks=(rank,),
    )


def parameter_changed(rank: int, name: str, view: torch.Tensor, gradient: torch.Tensor) -> AllhandsError:
    """A parameter has another dtype or shape than when it was wrapped."""
    return fail(
        "module-changed",
        f"the module was changed after it was wrapped: {name} is another tensor now",
        who=_this_rank(rank),
        why=f"its gradient is {gradient.dtype} {tuple(gradient.shape)} on {gradient.device}; "
        f"when it was wrapped it was {view.dtype} {tuple(view.shape)} on {view.device}",
        fix="convert or move the module first, then wrap it",
        ranks=(rank,),
    )


def module_changed(rank: int, new: Sequence[str], gone: Sequence[str], replaced: Sequence[str]) -> AllhandsError:
    """Parameters were added, removed or replaced."""
    lines = []
    for change, names in (("new", new), ("gone", gone), ("replaced", replaced)):
        if names:
            rest = len(names) - _MAX_NAMES
            lines.append(f"{change}: {join([*names[:_MAX_NAMES], *([f'{rest} more'] if rest > 0 else [])])}")
    return fail(
        "module-changed",
        "the module was changed after it was wrapped",
        who=_this_rank(rank),
        why="\n".join(lines) + "\n(observed: the module's parameters are not those of which gradients are averaged)",
        fix="change the module first, then wrap it; or wrap the changed module anew",
        ranks=(rank,),
    )


def parameters_differ(
    rank: int, what: str, rows: Mapping[str, Mapping[str, Sequence[int]]], *, values: bool
) -> AllhandsError:
    """Ranks have different parameters; ``rows`` has, for each name, the ranks of each value."""
    lines = [
        f"{name}: " + ", ".join(f"{value} on {ranks(where)}" for value, where in found.items())
        for name, found in list(rows.items())[:_MAX_NAMES]
    ]
    if len(rows) > _MAX_NAMES:
        lines.append(f"and {len(rows) - _MAX_NAMES} more")
    fix = (
        "give every rank the same values: seed each rank alike before the model is made, load the same checkpoint, or "
        "use init_sync=True (the default), which broadcasts those of rank 0"
        if values
        else "build the same module with the same arguments on every rank"
    )
    return fail("parameters-differ", what, who=_this_rank(rank), why="\n".join(lines), fix=fix)


def invalid_argument(problem: str, why: str, fix: str) -> AllhandsError:
    """An argument is not supported or makes no sense."""
    return fail("invalid-argument", f"DistributedDataParallel: {problem}", who="this rank", why=why, fix=fix)
