"""The progress bar of a bench: on a terminal only, drawn only while nothing is measured. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .config import Plan
from .tables import size_words

__all__ = ["bar"]


@contextmanager
def bar(plan: Plan) -> Iterator[Callable[[int, int, int], None]]:
    """Show a bar on standard error for a block; yields what `collective.measure` is to notify."""
    if not sys.stderr.isatty():
        yield lambda _size, _round, _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # It has no thread of its own: that would draw while ranks are measured, on one of their cores.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as shown:
        total = len(plan.sizes) * plan.rounds
        task = shown.add_task(f"{plan.operation}: starting {plan.ranks} ranks", total=total)
        shown.refresh()

        def notify(size: int, turn: int, done: int) -> None:
            words = f"{plan.operation} {size_words(size)}, round {turn} of {plan.rounds}"
            shown.update(task, description=words, completed=done, refresh=True)

        yield notify
