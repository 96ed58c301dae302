"""What `allhands.spawn` cannot start, and why: found before a process is started wherever that can be."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from ...errors import AllhandsError, fail

__all__ = ["chosen", "unguarded", "unpicklable"]


def chosen(fn: Callable[..., object], nprocs: int, start_method: str, *, serving: bool) -> BaseContext:
    """Return multiprocessing's context for ``start_method``; raise ArgumentError for what cannot be run with it.

    ``serving`` is whether this process has the ranks of another spawn.
    """
    methods = multiprocessing.get_all_start_methods()
    if start_method not in methods:
        raise _refuse(f"start_method={start_method!r} does not exist here", "", f"use one of {', '.join(methods)}")
    if not callable(fn):
        raise _refuse(f"{fn!r} is not a function", "", "pass the function first: spawn(fn, args=(...), nprocs=2)")
    if type(nprocs) is not int or nprocs < 1:
        raise _refuse(f"nprocs={nprocs!r} is not a number of processes", "", "pass at least 1")
    if start_method == "fork":
        _check_fork(serving=serving)
    else:
        _check_importable(fn, start_method)
    return multiprocessing.get_context(start_method)


def _check_fork(*, serving: bool) -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise _refuse(
            'start_method="fork" in a process that has a process group',
            "a fork shares the group's connections and memory, but none of the threads that serve them",
            'call destroy_process_group() first, or use start_method="spawn"',
        )
    if serving:
        raise _refuse(
            'start_method="fork" while this process serves the ranks of another spawn',
            "a fork would hold their coordinator's connections open",
            'join those first, or use start_method="spawn"',
        )


def _check_importable(fn: Callable[..., object], start_method: str) -> None:
    """Refuse a function that another process cannot find by importing its module."""
    name = getattr(fn, "__qualname__", "")
    if not name:
        return
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    nameless = getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file))  # noqa: PTH110
    if "<" in name:
        why = f"{name} has no name at the top level of a module, by which another process could find it"
    elif getattr(fn, "__module__", "") == "__main__" and nameless:
        why = f"{name} was typed into a notebook or a prompt, which another process cannot import"
    else:
        return
    raise _refuse(
        f'{name} cannot be run with start_method="{start_method}"',
        why,
        'pass start_method="fork" (before anything uses CUDA), or move the function to a file that can be imported',
    )


def unpicklable(problem: Exception, fn: Callable[..., object], args: tuple[Any, ...]) -> AllhandsError:
    """Say which of what is sent to a process cannot be pickled."""
    guilty = "fn or args"
    for name, value in [("fn", fn), *((f"args[{index}]", value) for index, value in enumerate(args))]:
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001  # whatever pickling raises, this is the one
            guilty = f"{name}, a {type(value).__name__},"
            break
    return _refuse(
        f"{guilty} cannot be sent to another process",
        f"{type(problem).__name__}: {problem}",
        'pass what pickle can take (names at the top level of a module, plain data, tensors), or start_method="fork"',
    )


def _refuse(what: str, why: str, fix: str) -> AllhandsError:
    return fail("invalid-argument", f"spawn: {what}", who=f"this process (pid {os.getpid()})", why=why, fix=fix)


def unguarded() -> AllhandsError:
    """Return the error for a script that spawns whenever it is imported."""
    return fail(
        "invalid-argument",
        "the script calls spawn whenever it is imported",
        who="every process that spawn started: each imports the script to find the function",
        why='the call does not stand under `if __name__ == "__main__":` (observed: the children came to it again)',
        fix='put the call, and what only the parent is to do, under `if __name__ == "__main__":`; '
        'or pass start_method="fork"',
    )
