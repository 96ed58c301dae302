"""Which of several values differ from the majority, and the lines that report it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from .diagnosis import ranks

__all__ = ["Judgement", "judge", "lines"]


class Judgement(msgspec.Struct, frozen=True):
    """The indices that differ from the majority, and a line for each distinct value."""

    odd: tuple[int, ...]
    lines: tuple[str, ...]


def judge(keys: Sequence[Hashable], said: Sequence[str], numbers: Sequence[int]) -> Judgement | None:
    """Return the indices whose ``keys`` differ from the majority; None if all are equal.

    ``said`` describes each value, ``numbers`` are the ranks. In a tie the value of the lowest index is the majority.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    if len(groups) <= 1:
        return None
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
    odd = sorted(index for group in ordered[1:] for index in group)
    found = [line for group in ordered for line in lines([said[i] for i in group], [numbers[i] for i in group])]
    return Judgement(tuple(odd), tuple(found))


def lines(said: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return a line for each distinct text, with the ranks that it applies to."""
    members: dict[str, list[int]] = {}
    for text, number in zip(said, numbers, strict=True):
        members.setdefault(text, []).append(number)
    return [f"{ranks(numbers)} {text}" for text, numbers in members.items()]
