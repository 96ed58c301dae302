"""Run a function on several items concurrently, even if the process may start no more threads.

concurrent.futures raises in that case, and a limit on threads is one of the faults that the doctor looks for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_concurrently"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_concurrently(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call ``work`` on all ``items`` concurrently; return the results in their order.

    Raises the exception of the first item that failed. The calling thread works, too.
    """
    results: list[Future[_Result]] = [Future() for _ in items]
    # deque.popleft is atomic.
    left = deque(zip(items, results, strict=True))

    def run() -> None:
        while True:
            try:
                item, result = left.popleft()
            except IndexError:
                return
            try:
                result.set_result(work(item))
            except BaseException as problem:  # noqa: BLE001  # raised again below
                result.set_exception(problem)

    # The work is mostly waiting for answers; more threads than this gain nothing.
    for _ in range(min(32, len(items))):
        try:
            threading.Thread(target=run, name="allhands-doctor", daemon=True).start()
        except RuntimeError:
            break  # The limit on processes and threads is reached.
    run()
    return [each.result() for each in results]
