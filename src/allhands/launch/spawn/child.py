"""What runs in a process of `allhands.spawn` around the function: it dies with its parent, and leaves evidence."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..record import exited, raised, write
from ..worker import follow

__all__ = ["NAME", "UNGUARDED", "Descriptor", "Order", "importing", "run"]

# How such a process is called in multiprocessing, followed by its rank; known before the script is imported again.
NAME = "allhands-rank-"

# How a process ends that came to `spawn` again while it imported the script; none of the shell's or the signals'.
UNGUARDED = 96

# What Ctrl-C means to a shell.
_INTERRUPTED = 128 + signal.SIGINT


class Descriptor:
    """An open file that is to be open in the child too, whatever the start method."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to do. ``direct`` is whether the kernel's word of the parent's death can be relied on."""

    rank: int
    parent: int
    direct: bool
    results: bool
    environment: Mapping[str, str]
    dropped: tuple[str, ...]
    record: Descriptor
    fatal: Descriptor
    board: Descriptor
    parcel: Descriptor


def importing() -> bool:
    """Tell whether this process is still importing the script; a child of `spawn` that comes here ends at once."""
    import multiprocessing

    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return False
    if process.name.startswith(NAME):
        # Not sys.exit: the fork server does not pass its status on, and the script may catch it.
        os._exit(UNGUARDED)
    return True


def run(order: Order, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Call ``function`` as this rank; what it returns or raises goes into the parcel, how it ended into the record."""
    record = order.record.number
    _settle(order)
    write(record, {"begun": True}, final=False)
    try:
        value = function(order.rank, *args)
        if order.results:
            _pack(order, value)
    except SystemExit as problem:
        write(record, exited(problem))
        raise
    except BaseException as problem:  # noqa: BLE001  # told to the parent, which raises it
        _fail(order, problem)
    write(record, {"end": "done"})


def _settle(order: Order) -> None:
    if order.direct:
        follow(order.parent)
    else:
        _watch(order.parent)
    for each in (order.record, order.fatal, order.board, order.parcel):
        os.set_inheritable(each.number, False)
    import faulthandler

    faulthandler.enable(order.fatal.number)
    for name in order.dropped:
        os.environ.pop(name, None)
    os.environ.update(order.environment)
    os.environ["ALLHANDS_RECORDER_FD"] = f"{order.board.number}:{os.getpid()}"


def _watch(parent: int) -> None:
    """Die when ``parent`` does, though it is not this process's parent, or the thread that started us may end first."""
    import select
    import threading

    def wait(pidfd: int) -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=wait, args=(pidfd,), name="allhands-parent", daemon=True).start()


def _fail(order: Order, problem: BaseException) -> None:
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    write(order.record.number, raised(problem, trace))
    # Where it cannot be pickled, the parent has its words alone, which are in the record.
    with contextlib.suppress(Exception):
        _put(order.parcel.number, problem)
    # In the middle of `except`, so that the end of the group finds the exception and tells the others.
    sys.exit(_INTERRUPTED if isinstance(problem, KeyboardInterrupt) else 1)


def _pack(order: Order, value: object) -> None:
    try:
        _put(order.parcel.number, value)
    except Exception as problem:
        from ...errors import fail

        raise fail(
            "invalid-argument",
            f"what rank {order.rank} returned cannot be handed to the parent",
            who=f"rank {order.rank} (pid {os.getpid()}), which returned a {type(value).__name__}",
            why=f"{type(problem).__name__}: {problem}",
            fix="return what pickle can take (numbers, lists, tensors), or leave results=True out",
            ranks=(order.rank,),
        ) from problem


def _put(descriptor: int, value: object) -> None:
    """Write the pickle of ``value``. Plain pickle: what torch shares between processes would die with this one."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
