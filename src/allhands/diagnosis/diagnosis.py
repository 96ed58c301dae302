"""`Diagnosis`, the content of every error, log line and report, and how its parts are written.

It is plain data that is sent between processes, so every rank can report the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = ["MOST_NAMED", "Diagnosis", "by_host", "count", "duration", "join", "ranks"]


class Diagnosis(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened, which ranks are concerned, why, and how to fix it.

    ``certain`` is True where the cause was observed (a closed connection, a refused packet, two equal
    claims) and False where it is inferred; ``why`` then begins with "probably".
    """

    slug: str
    what: str
    who: str = ""
    why: str = ""
    fix: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    certain: bool = True
    traceback: str = ""

    def render(self, title: str) -> str:
        """Return the text that a user sees, headed by ``title`` (the exception's name)."""
        lines = [f"{title}: {self.what}   [{self.slug}]"]
        for label, text in (("who", self.who), ("why", self.why), ("fix", self.fix)):
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {label}:  {first}")
                lines.extend(f"        {line}" for line in rest)
        if self.traceback:
            lines.append("  its traceback:")
            lines.extend(f"    | {line}" for line in self.traceback.rstrip().splitlines())
        return "\n".join(lines)


# Longer lists hide the message; the rest is counted.
MOST_NAMED = 16


def join(parts: Sequence[str], last: str = "and") -> str:
    """Return ``a, b and c``."""
    if len(parts) <= 1:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def count(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``3 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a rounded duration: ``0.4 s``, ``12 s``, ``30 min``."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def ranks(numbers: Iterable[int], noun: str = "rank") -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5 and 7``; after MOST_NAMED ranks ``and N more``."""
    ordered = sorted(set(numbers))
    if not ordered:
        return ""
    if len(ordered) == 1:
        return f"{noun} {ordered[0]}"
    named, left = ordered[:MOST_NAMED], len(ordered) - MOST_NAMED
    runs: list[str] = []
    # In a run of consecutive numbers the difference to the index is constant.
    for _, pairs in itertools.groupby(enumerate(named), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        # Two numbers are not written as a range.
        runs += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    if left > 0:
        runs.append(f"{left} more")
    return f"{noun}s {join(runs)}"


def by_host(hosts: Mapping[int, str], noun: str = "rank") -> str:
    """Return ranks grouped by host: ``rank 3 (node-a), ranks 6 and 7 (node-b)``.

    Groups are in the order of their lowest rank; at most MOST_NAMED ranks are named in all.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(hosts)[:MOST_NAMED]:
        groups.setdefault(hosts[rank], []).append(rank)
    parts = [ranks(members, noun) + (f" ({host})" if host else "") for host, members in groups.items()]
    left = len(hosts) - MOST_NAMED
    if left > 0:
        parts.append(f"{left} more")
    return join(parts)
