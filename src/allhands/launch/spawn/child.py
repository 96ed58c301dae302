"""The code around the function in a process of `allhands.spawn`: it ends with its parent, and records its own end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..worker import die_with_parent, exception_record, system_exit_record, write_exit_record

__all__ = ["PROCESS_NAME", "REENTERED_STATUS", "ChildTask", "InheritedFds", "is_importing_main", "run"]

# The name of such a process in multiprocessing, followed by its rank; set before the script is imported again.
PROCESS_NAME = "allhands-rank-"

# The exit status of a process that called `spawn` while it imported the script; not one of a shell or a signal.
REENTERED_STATUS = 96

# A shell's exit status after Ctrl-C.
_INTERRUPTED = 128 + signal.SIGINT


class InheritedFds:
    """Descriptors that stay open in the child, whatever the start method."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _receive_fds, tuple(DupFd(number) for number in self.numbers)


def _receive_fds(*duplicates: Any) -> InheritedFds:
    return InheritedFds(*(duplicate.detach() for duplicate in duplicates))


@dataclass(frozen=True, slots=True)
class ChildTask:
    """The arguments of `run`, except the function and its arguments."""

    rank: int
    parent: int
    # Whether PR_SET_PDEATHSIG works: the parent's main thread starts the process directly.
    direct: bool
    results: bool
    environment: Mapping[str, str]
    removed_variables: tuple[str, ...]
    # Exit record, fatal stack, flight recorder, and the pickle of the return value or the exception.
    evidence: InheritedFds


def is_importing_main() -> bool:
    """Return whether this process is still importing the script; a child of `spawn` exits at once instead."""
    import multiprocessing

    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return False
    if process.name.startswith(PROCESS_NAME):
        # Not sys.exit: the fork server does not pass its status on, and the script may catch it.
        os._exit(REENTERED_STATUS)
    return True


def run(task: ChildTask, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Call ``function`` as this rank; store its result or exception, and write the exit record."""
    if task.direct:
        die_with_parent(task.parent)
    else:
        _watch_parent(task.parent)
    record, fatal, recorder, result = task.evidence.numbers
    for descriptor in task.evidence.numbers:
        os.set_inheritable(descriptor, False)
    faulthandler.enable(fatal)
    for name in task.removed_variables:
        os.environ.pop(name, None)
    os.environ.update(task.environment)
    os.environ["ALLHANDS_RECORDER_FD"] = f"{recorder}:{os.getpid()}"
    write_exit_record(record, {"begun": True}, final=False)
    try:
        value = function(task.rank, *args)
        if task.results:
            _store_result(task.rank, result, value)
    except SystemExit as problem:
        write_exit_record(record, system_exit_record(problem))
        raise
    except BaseException as problem:  # noqa: BLE001  # raised by the parent
        _fail(record, result, problem)
    write_exit_record(record, {"end": "done"})


def _watch_parent(parent: int) -> None:
    """Die with ``parent`` where it is not this process's parent, or where its starting thread may end first."""
    import threading
    from multiprocessing.connection import wait

    def kill_after(pidfd: int) -> None:
        wait([pidfd])
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=kill_after, args=(pidfd,), name="allhands-parent", daemon=True).start()


def _fail(record: int, result: int, problem: BaseException) -> None:
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    write_exit_record(record, exception_record(problem, trace))
    # Where it cannot be pickled, the parent has its text from the exit record.
    with contextlib.suppress(Exception):
        _write_pickle(result, problem)
    # Inside `except`, so that the exit handler of the group finds the exception and reports it to the other ranks.
    sys.exit(_INTERRUPTED if isinstance(problem, KeyboardInterrupt) else 1)


def _store_result(rank: int, result: int, value: object) -> None:
    try:
        _write_pickle(result, value)
    except Exception as problem:
        from ...errors import fail

        raise fail(
            "invalid-argument",
            f"what rank {rank} returned cannot be handed to the parent",
            who=f"rank {rank} (pid {os.getpid()}), which returned a {type(value).__name__}",
            why=f"{type(problem).__name__}: {problem}",
            fix="return what pickle can take (numbers, lists, tensors), or leave results=True out",
            ranks=(rank,),
        ) from problem


def _write_pickle(descriptor: int, value: object) -> None:
    # Plain pickle: memory that torch.multiprocessing would share is gone with this process.
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
