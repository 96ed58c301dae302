"""Slurm's short forms: host lists (`rack[1-2]n[01-04,07]-ib`) and counts per node (`2(x3),1`)."""

from __future__ import annotations

import itertools
import re

from ..errors import AllhandsError, fail
from .base import me

__all__ = ["MOST", "counts", "expand", "split"]

# Slurm's own limit for one expression (MAX_SLURM_NODES): more is a typing error, and would fill the memory.
MOST = 65536

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def split(written: str) -> list[str]:
    """Split a list at the commas and white space that are not inside brackets."""
    items, item, inside = [], "", False
    for letter in written:
        if letter in "[]":
            if inside == (letter == "["):
                raise _malformed(written, f"a bracket is {'opened twice' if inside else 'closed but not open'}")
            inside = not inside
        if not inside and (letter == "," or letter.isspace()):
            items.append(item)
            item = ""
        else:
            item += letter
    if inside:
        raise _malformed(written, "a bracket is not closed")
    return [name for name in [*items, item] if name]


def expand(written: str) -> list[str]:
    """Return every host of a list, in order; raises `invalid-argument` for what is not a host list."""
    hosts: list[str] = []
    for item in split(written):
        # Odd pieces are what stood in brackets; the last bracket's numbers go round fastest, as in Slurm.
        pieces = re.split(r"[\[\]]", item)
        choices = [_numbers(written, piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        total = len(hosts)
        for choice in itertools.product(*choices):
            total += 1
            if total > MOST:
                raise _malformed(written, f"it names more than {MOST} hosts")
            hosts.append("".join(choice))
    return hosts


def counts(written: str) -> list[int]:
    """Return the number of tasks of each node, in order: `2(x3),1` is 2, 2, 2, 1."""
    numbers: list[int] = []
    for item in written.replace(" ", "").split(","):
        match = _COUNT.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if match is None or len(numbers) + times > MOST:
            raise _malformed(written, f"{item!r} is not a count such as 2 or 2(x3)")
        numbers += [int(match[1])] * times
    return numbers


def _numbers(written: str, inside: str) -> list[str]:
    """Return what stands for one bracket; leading zeros of a range's start fix the width."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(written, f"{part!r} is not a number or a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _malformed(written, f"the range {part} goes backwards")
        if len(found) + int(last) - int(first) >= MOST:
            raise _malformed(written, f"it names more than {MOST} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _malformed(written: str, why: str) -> AllhandsError:
    shown = written if len(written) <= 80 else f"{written[:80]}…"
    return fail(
        "invalid-argument",
        f"{shown!r} is not a host list",
        who=me(),
        why=why,
        fix="a host list looks like node[01-04,07],gpu-a; if a script cut it off, use the scheduler's own variable",
    )
