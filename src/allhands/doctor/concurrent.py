"""Run a function on several items concurrently, even if the process may start no more threads.

concurrent.futures raises in that case, and a limit on threads is one of the faults that the doctor looks for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["Concurrent", "run_concurrently"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# The work is mostly waiting for answers; more threads than this gain nothing.
_MOST_THREADS = 32


class Concurrent(Generic[_Item, _Result]):
    """Work on several items that has been started; the thread that calls `results` does what is left."""

    def __init__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> None:
        self._work = work
        self._results: list[Future[_Result]] = [Future() for _ in items]
        # deque.popleft is atomic.
        self._left = deque(zip(items, self._results, strict=True))
        for _ in range(min(_MOST_THREADS, len(items))):
            try:
                threading.Thread(target=self._run, name="allhands-doctor", daemon=True).start()
            except RuntimeError:
                break  # The limit on processes and threads is reached.

    def _run(self) -> None:
        while True:
            try:
                item, result = self._left.popleft()
            except IndexError:
                return
            try:
                result.set_result(self._work(item))
            except BaseException as problem:  # noqa: BLE001  # raised again by `results`
                result.set_exception(problem)

    def results(self) -> list[_Result]:
        """Return the results in the order of the items; raise the exception of the first item that failed."""
        self._run()
        return [each.result() for each in self._results]


def run_concurrently(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call ``work`` on all ``items`` concurrently; return the results in their order."""
    return Concurrent(work, items).results()
