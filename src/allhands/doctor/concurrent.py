"""Several looks at the same time, also on a machine that gives no more threads: there the asker does what is left."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["Together", "together"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# More threads than this gain nothing where each mostly waits for an answer.
_MOST = 32


class Together(Generic[_Item, _Result]):
    """Work that has begun on many things; `results` takes part in it until all is done."""

    def __init__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> None:
        self._work = work
        self._results: list[Future[_Result]] = [Future() for _ in items]
        # Taken from by several threads: popleft is one step of the interpreter.
        self._left = deque(zip(items, self._results, strict=True))
        for _ in range(min(_MOST, len(items))):
            try:
                threading.Thread(target=self._take, name="allhands-look", daemon=True).start()
            except RuntimeError:
                # The limit on processes and threads is reached, which is just what the doctor is to tell of.
                break

    def _take(self) -> None:
        while True:
            try:
                item, result = self._left.popleft()
            except IndexError:
                return
            try:
                result.set_result(self._work(item))
            except BaseException as problem:  # noqa: BLE001  # raised again where the result is asked for
                result.set_exception(problem)

    def results(self) -> list[_Result]:
        """Return what came of each item, in their order; raise what the first that failed raised."""
        self._take()
        return [each.result() for each in self._results]


def together(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Do ``work`` on all ``items`` at the same time; return the results in their order."""
    return Together(work, items).results()
