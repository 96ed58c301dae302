"""What people see: one screen, green in a line for each section, and a block for everything that is not."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from .finding import SECTIONS, Finding, exit_code

__all__ = ["SCHEMA", "block", "lines", "render", "report"]

# The version of what --json prints; raised when a field changes its meaning or goes away. New fields may come.
SCHEMA = 1

_MARKS = {"green": "ok", "yellow": "!", "red": "X"}
_COLOURS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
_PLAIN = "\x1b[0m"

# Where the text begins: the longest name of a section and a blank on each side.
_MARGIN = 17

_LABELS = ("why", "fix", "type", "did")


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings without colours, for another machine's screen."""
    return _body(findings, {}, 100, colour=False, verbose=False)


def render(
    findings: Sequence[Finding],
    heading: str,
    *,
    width: int = 100,
    colour: bool = False,
    verbose: bool = False,
    done: dict[str, str] | None = None,
) -> str:
    """Return the whole screen. ``done`` is what --fix did, by the check that it was for."""
    counts = {level: sum(1 for each in findings if each.level == level) for level in ("red", "yellow", "green")}
    if counts["red"] or counts["yellow"]:
        words = [f"{number} {level}" for level, number in counts.items() if number]
        summary = ", ".join(words) + "; `allhands explain NAME` tells more of a name in brackets"
    else:
        summary = "all is green" if counts["green"] == 1 else f"all {counts['green']} checks are green"
    return "\n".join([heading, *_body(findings, done or {}, width, colour=colour, verbose=verbose), summary])


def _body(findings: Sequence[Finding], done: dict[str, str], width: int, *, colour: bool, verbose: bool) -> list[str]:
    shown: list[str] = []
    for section in SECTIONS:
        mine = [each for each in findings if each.section == section]
        good = [each for each in mine if each.level == "green"]
        name = section
        if verbose:
            for each in good:
                evidence = f" ({each.why})" if each.why else ""
                shown += _paragraph(name, "green", f"{each.what}{evidence}", width, colour=colour)
                name = ""
        elif good:
            shown += _paragraph(name, "green", "; ".join(each.what for each in good), width, colour=colour)
            name = ""
        # The worst first, below what is well, so that it is nearest to where the eye is.
        for each in sorted((each for each in mine if each.level != "green"), key=lambda each: each.level != "red"):
            shown += block(name, each, done.get(each.check, ""), width, colour=colour)
            name = ""
    return shown


def _paragraph(name: str, level: str, text: str, width: int, *, colour: bool) -> list[str]:
    head = f"  {name:<{_MARGIN - 6}} {_MARKS[level]:>2} "
    wrapped = textwrap.wrap(text, max(40, width - _MARGIN), break_long_words=False, break_on_hyphens=False) or [""]
    first = head if not colour else f"  {name:<{_MARGIN - 6}} {_COLOURS[level]}{_MARKS[level]:>2}{_PLAIN} "
    return [first + wrapped[0], *(" " * len(head) + line for line in wrapped[1:])]


def block(name: str, found: Finding, did: str, width: int, *, colour: bool) -> list[str]:
    """Return what is shown of a finding that is not green; ``name`` of its section, ``did`` what --fix did."""
    slug = f"   [{found.slug}]" if found.slug else ""
    shown = _paragraph(name, found.level, found.what + slug, width, colour=colour)
    indent = " " * (_MARGIN + 2)
    for label, text in zip(_LABELS, (found.why, found.fix, "", did), strict=True):
        if label == "type":
            # Commands stay whole, so that they can be copied.
            shown += [f"{indent}{label if number == 0 else '':<5} {each}" for number, each in enumerate(found.commands)]
        elif text:
            room = max(40, width - len(indent) - 6)
            first, *rest = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
            shown += [f"{indent}{label:<5} {first}", *(f"{indent}      {line}" for line in rest)]
    return shown


def report(
    findings: Sequence[Finding], *, host: str, target: str, seconds: float, done: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return everything for programs; docs/doctor.md describes the fields."""
    return {
        "schema": SCHEMA,
        "host": host,
        "target": target,
        "seconds": round(seconds, 3),
        "exit_code": exit_code(findings),
        "counts": {level: sum(1 for each in findings if each.level == level) for level in ("green", "yellow", "red")},
        "findings": [msgspec.to_builtins(each) for each in findings],
        "done": done or {},
    }
