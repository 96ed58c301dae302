"""A finding of the doctor, and how findings are printed: one screen for people, one JSON object for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ..diagnosis import Diagnosis

__all__ = [
    "SCHEMA",
    "SECTIONS",
    "Finding",
    "Level",
    "Section",
    "block",
    "exit_code",
    "lines",
    "render",
    "report",
    "wrap",
]

Level = Literal["green", "yellow", "red"]

# In the order in which they are shown: from what every job needs to what only some jobs have.
SECTIONS = ("names", "network", "resources", "stack", "environment", "job")

# The version of the JSON report. Increased when a field changes its meaning or is removed; new fields may be added.
SCHEMA = 1

_MARKS = {"green": "ok", "yellow": "!", "red": "X"}
_COLOURS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
_PLAIN = "\x1b[0m"

# The columns of a section's name and of the evidence below a finding.
_MARGIN, _INDENT = " " * 14, " " * 19


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    ``what`` is one line, ``why`` the evidence, ``fix`` the remedy and ``commands`` the shell commands to type.
    ``slug`` is the diagnosis that ranks would report, "" if there is none. ``certain`` is False if the cause is
    inferred. ``details`` are for programs.
    """

    section: str
    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    slug: str = ""
    certain: bool = True
    commands: tuple[str, ...] = ()
    details: dict[str, Any] = {}


class Section(NamedTuple):
    """One of SECTIONS, with constructors of its findings."""

    name: str

    def green(self, check: str, what: str, why: str = "", **details: Any) -> Finding:
        """Return a finding that needs no action."""
        return Finding(self.name, check, "green", what, why, details=details)

    def at(self, level: Level, check: str, slug: str, what: str, **parts: Any) -> Finding:
        """Return a finding of this ``level``."""
        return Finding(self.name, check, level, what, slug=slug, **parts)

    def yellow(self, check: str, slug: str, what: str, **parts: Any) -> Finding:
        """Return a finding that may stall a job, or slows it down."""
        return self.at("yellow", check, slug, what, **parts)

    def red(self, check: str, slug: str, what: str, **parts: Any) -> Finding:
        """Return a finding with which a job cannot run."""
        return self.at("red", check, slug, what, **parts)

    def of(self, check: str, level: Level, diagnosis: Diagnosis, **parts: Any) -> Finding:
        """Return a finding with the text of ``diagnosis``."""
        text = {name: getattr(diagnosis, name) for name in ("what", "why", "fix", "slug", "certain")}
        return Finding(self.name, check, level, **text, **parts)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if any finding is red, else 0."""
    return int(any(found.level == "red" for found in findings))


def render(findings: Sequence[Finding], heading: str, done: dict[str, str] | None = None, **style: Any) -> str:
    """Return the whole screen. ``done`` maps checks to the changes that --fix made; ``style`` is that of `lines`."""
    counts = _counts(findings)
    if counts["red"] or counts["yellow"]:
        numbers = [f"{counts[level]} {level}" for level in ("red", "yellow", "green") if counts[level]]
        summary = ", ".join(numbers) + "; `allhands explain NAME` prints the page of a name in brackets"
    else:
        summary = "all is green" if counts["green"] == 1 else f"all {counts['green']} checks are green"
    return "\n".join([heading, *lines(findings, done, **style), summary])


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {level: sum(each.level == level for each in findings) for level in ("green", "yellow", "red")}


def lines(
    findings: Sequence[Finding],
    done: dict[str, str] | None = None,
    *,
    width: int = 100,
    colour: bool = False,
    verbose: bool = False,
) -> list[str]:
    """Return the findings as lines, by section; green ones without their evidence share a paragraph."""
    shown: list[str] = []
    for section in SECTIONS:
        mine = [each for each in findings if each.section == section]
        good = [
            each.what + (f" ({each.why})" if verbose and each.why else "") for each in mine if each.level == "green"
        ]
        texts = good if verbose or not good else ["; ".join(good)]
        own = [line for text in texts for line in _paragraph("green", text, width, colour=colour)]
        # Problems follow, the worst first.
        for level in ("red", "yellow"):
            for each in mine:
                if each.level == level:
                    own += block(each, (done or {}).get(each.check, ""), width, colour=colour)
        shown += [f"  {section:<11} {line.removeprefix(_MARGIN)}" for line in own[:1]] + own[1:]
    return shown


def _paragraph(level: str, text: str, width: int, *, colour: bool) -> list[str]:
    mark = f"{_MARKS[level]:>2}"
    first, *rest = wrap(f"{_MARGIN}{mark} ", text, width)
    return [first.replace(mark, f"{_COLOURS[level]}{mark}{_PLAIN}", 1) if colour else first, *rest]


def wrap(head: str, text: str, width: int) -> list[str]:
    """Return ``head`` and ``text`` as lines of ``width``, all but the first indented."""
    return textwrap.wrap(
        text,
        max(len(head) + 40, width),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def block(found: Finding, did: str, width: int, *, colour: bool) -> list[str]:
    """Return the lines of a yellow or red finding; ``did`` is the change that --fix made."""
    slug = f"   [{found.slug}]" if found.slug else ""
    shown = _paragraph(found.level, found.what + slug, width, colour=colour)
    for label, text in (("why", found.why), ("fix", found.fix)):
        shown += wrap(f"{_INDENT}{label:<5} ", text, width)
    # Commands are not wrapped, so that they can be copied.
    shown += [f"{_INDENT}{'' if number else 'type':<5} {each}" for number, each in enumerate(found.commands)]
    return shown + wrap(f"{_INDENT}did   ", did, width)


def report(
    findings: Sequence[Finding], *, host: str, target: str, seconds: float, done: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the report for programs; docs/doctor.md describes its fields."""
    return {
        "schema": SCHEMA,
        "host": host,
        "target": target,
        "seconds": round(seconds, 3),
        "exit_code": exit_code(findings),
        "counts": _counts(findings),
        "findings": [msgspec.to_builtins(each) for each in findings],
        "done": done or {},
    }
