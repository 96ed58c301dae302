"""One thing that the doctor looked at: how it stands, the evidence, and the fix. Plain data, as `--json` prints it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from ..diagnosis import Diagnosis

__all__ = ["SECTIONS", "Finding", "Level", "exit_code", "green", "of", "red", "yellow"]

Level = Literal["green", "yellow", "red"]

# In the order in which they are shown: from what everything else needs to what only some jobs have.
SECTIONS = ("names", "network", "resources", "stack", "environment", "job")


class Finding(msgspec.Struct, frozen=True):
    """How one thing stands.

    ``what`` is one line; ``why`` the evidence; ``fix`` says what to do and ``commands`` what to type, ready for a
    shell. ``slug`` is the diagnosis that ranks would get, "" where all is well. ``certain`` is False where the cause
    is inferred. ``details`` are for programs.
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


def green(section: str, check: str, what: str, why: str = "", **details: Any) -> Finding:
    """Return a finding that nobody has to do anything about."""
    return Finding(section, check, "green", what, why, details=details)


def yellow(section: str, check: str, slug: str, what: str, **parts: Any) -> Finding:
    """Return a finding that may stall a job, or that slows it down."""
    return Finding(section, check, "yellow", what, slug=slug, **parts)


def red(section: str, check: str, slug: str, what: str, **parts: Any) -> Finding:
    """Return a finding with which a job cannot run."""
    return Finding(section, check, "red", what, slug=slug, **parts)


def of(section: str, check: str, level: Level, diagnosis: Diagnosis, **parts: Any) -> Finding:
    """Return the finding that says what ``diagnosis`` says, in its words."""
    return Finding(
        section,
        check,
        level,
        diagnosis.what,
        why=diagnosis.why,
        fix=diagnosis.fix,
        slug=diagnosis.slug,
        certain=diagnosis.certain,
        **parts,
    )


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 where anything is red, else 0."""
    return int(any(found.level == "red" for found in findings))
