"""What is wrong with a model that is trained on several ranks, in words. Pure: whoever calls knows the facts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import torch

from ...diagnosis import join, ranks
from ...errors import AllhandsError, fail

__all__ = ["changed", "differ", "graph_changed", "refused", "retyped", "senseless", "twice", "unfinished", "unused"]

# More parameters than this bury the message; the rest is counted.
_MOST = 12


def _me(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"


def _names(names: Sequence[str]) -> str:
    named = list(names[:_MOST])
    left = len(names) - len(named)
    return join([*named, *([f"{left} more"] if left else [])])


def unused(rank: int, where: Mapping[str, Sequence[int]], *, static: bool) -> AllhandsError:
    """Parameters got no gradient; ``where`` says on which ranks, by name."""
    lines = [f"{name} on {ranks(found)}" for name, found in list(where.items())[:_MOST]]
    left = len(where) - len(lines)
    if left:
        lines.append(f"and {left} more parameters")
    number = f"{len(where)} parameters" if len(where) > 1 else "a parameter"
    what = (
        f"{number} that had a gradient in the first backward pass got none" if static else f"{number} got no gradient"
    )
    fix = (
        "leave out static_graph=True where the graph changes"
        if static
        else "use every parameter in the loss, freeze those that are not used (requires_grad_(False) before wrapping), "
        "or pass find_unused_parameters=True"
    )
    return fail(
        "unused-parameters",
        f"{what} in this backward pass",
        who=_me(rank),
        why="no gradient came for\n" + "\n".join(lines),
        fix=fix,
        ranks=tuple(sorted({each for found in where.values() for each in found})),
    )


def twice(rank: int, name: str, *, static: bool) -> AllhandsError:
    """A gradient was added to after its bucket was ready to be reduced."""
    return fail(
        "gradient-twice",
        f"{name} got a gradient again after its bucket was complete",
        who=_me(rank),
        why="a backward pass inside this one computed it: activation checkpointing with use_reentrant=True that uses "
        "the parameter several times, or a call of backward() in a hook",
        fix="leave out static_graph=True where the graph changes, or checkpoint with use_reentrant=False"
        if static
        else "checkpoint with use_reentrant=False; or pass static_graph=True if every pass uses the same parameters",
        ranks=(rank,),
    )


def graph_changed(rank: int, name: str) -> AllhandsError:
    """A static graph was not static."""
    return fail(
        "gradient-twice",
        f"{name} got a gradient, although it had none in the first backward pass",
        who=_me(rank),
        why="static_graph=True promises that every backward pass uses the same parameters",
        fix="leave out static_graph=True; find_unused_parameters=True allows for what changes",
        ranks=(rank,),
    )


def unfinished(rank: int, ready: int, buckets: int) -> AllhandsError:
    """The last backward pass ended by an exception in the middle of its reductions."""
    return fail(
        "backward-unfinished",
        f"the last backward pass stopped after {ready} of {buckets} buckets were complete",
        who=_me(rank),
        why="an exception left it and was caught, while the other ranks wait for the rest of its gradients: from here "
        "on every reduction would mix gradients of different passes",
        fix="do not catch exceptions around backward() on single ranks; let them end the job, or end the group and "
        "form a new one on all ranks",
        ranks=(rank,),
    )


def retyped(rank: int, name: str, view: torch.Tensor, gradient: torch.Tensor) -> AllhandsError:
    """A parameter has another type or shape than when it was wrapped."""
    return fail(
        "module-changed",
        f"the module was changed after it was wrapped: {name} is another tensor now",
        who=_me(rank),
        why=f"its gradient is {gradient.dtype} {tuple(gradient.shape)} on {gradient.device}; "
        f"when it was wrapped it was {view.dtype} {tuple(view.shape)} on {view.device}",
        fix="convert or move the module first, then wrap it",
        ranks=(rank,),
    )


def changed(rank: int, new: Sequence[str], gone: Sequence[str], other: Sequence[str]) -> AllhandsError:
    """Parameters came, went, or were replaced."""
    found = [f"{verb}: {_names(names)}" for verb, names in (("new", new), ("gone", gone), ("replaced", other)) if names]
    return fail(
        "module-changed",
        "the module was changed after it was wrapped",
        who=_me(rank),
        why="\n".join(found) + "\n(observed: the module's parameters are not those of which gradients are averaged)",
        fix="change the module first, then wrap it; or wrap the changed module anew",
        ranks=(rank,),
    )


def differ(rank: int, what: str, rows: Mapping[str, Mapping[str, Sequence[int]]], *, values: bool) -> AllhandsError:
    """Ranks disagree; ``rows`` say by name which ranks have which value, in words."""
    lines = [
        f"{name}: " + ", ".join(f"{value} on {ranks(where)}" for value, where in found.items())
        for name, found in list(rows.items())[:_MOST]
    ]
    if len(rows) > _MOST:
        lines.append(f"and {len(rows) - _MOST} more")
    fix = (
        "give every rank the same values: seed each rank alike before the model is made, load the same checkpoint, or "
        "let init_sync=True (the default) hand out those of rank 0"
        if values
        else "build the same module with the same arguments on every rank"
    )
    return fail("parameters-differ", what, who=_me(rank), why="\n".join(lines), fix=fix)


def refused(argument: str, instead: str, why: str = "") -> AllhandsError:
    """An argument of torch's that we do not have."""
    return fail(
        "invalid-argument",
        f"DistributedDataParallel: {argument} is not supported",
        who="this rank",
        why=why,
        fix=instead,
    )


def senseless(argument: str, why: str, fix: str) -> AllhandsError:
    """An argument that makes no sense."""
    return fail("invalid-argument", f"DistributedDataParallel: {argument}", who="this rank", why=why, fix=fix)
