"""Who differs from the others: what several say, told apart by a key, and put into lines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from .diagnosis import ranks

__all__ = ["Judgement", "judge", "lines"]


class Judgement(msgspec.Struct, frozen=True):
    """Who differs from the others, by their place among those compared, and a line for each thing that was said."""

    odd: tuple[int, ...]
    lines: tuple[str, ...]


def judge(keys: Sequence[Hashable], said: Sequence[str], numbers: Sequence[int]) -> Judgement | None:
    """Return who differs from the others by ``keys``; None where all are the same. ``numbers`` are names of ranks.

    What most have is taken for what was meant; with as many on both sides, what the lowest has.
    """
    sides: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        sides.setdefault(key, []).append(index)
    if len(sides) <= 1:
        return None
    ordered = sorted(sides.values(), key=lambda side: (-len(side), side[0]))
    odd = sorted(index for side in ordered[1:] for index in side)
    told = [line for side in ordered for line in lines([said[index] for index in side], [numbers[i] for i in side])]
    return Judgement(tuple(odd), tuple(told))


def lines(said: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return a line for each thing that is said, with all who say it."""
    who: dict[str, list[int]] = {}
    for words, number in zip(said, numbers, strict=True):
        who.setdefault(words, []).append(number)
    return [f"{ranks(members)} {words}" for words, members in who.items()]
