"""`allhands explain`: the page of one diagnosis (`pages/SLUG.md`) or the list of all; and the index in `docs/`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import fail
from . import CATALOGUE, Entry, closest, join, page

__all__ = ["index", "render"]

# The catalogue is one ordered list; each section begins with this slug.
_SECTIONS = {
    "rank-out-of-range": "Identity of this process",
    "address-unresolvable": "Reaching the coordinator",
    "missing-ranks": "The roll call",
    "nccl-missing": "Backends, devices and resources",
    "peer-failed": "Failures of a group",
    "unused-parameters": "Training",
    "name-shadowed": "Found by allhands doctor",
}

# Relative to docs/diagnoses.md. Not through the link docs/diagnoses: code hosting sites do not follow it.
_PAGES = "../src/allhands/diagnosis/pages"

# In a terminal a link to another page is shown as its slug.
_LINK = re.compile(r"\[([a-z-]+)\]\(\1\.md\)")


def render(slug: str | None) -> str:
    """Return the page on ``slug`` for a terminal, or the list of all slugs for None.

    Raises `ArgumentError` for an unknown slug, and suggests similar ones.
    """
    if slug is None:
        width = max(map(len, CATALOGUE))
        blocks = [
            "\n".join([heading, *(f"  {entry.slug:<{width}}  {entry.meaning}" for entry in entries)])
            for heading, entries in _sections()
        ]
        return "\n\n".join([*blocks, "`allhands explain NAME` prints the page on one of them."]) + "\n"
    if slug not in CATALOGUE:
        near = closest(slug)
        guess = f"Did you mean {join(near, 'or')}? " if near else ""
        raise fail(
            "invalid-argument",
            f"there is no diagnosis {slug!r}",
            who="the name given to explain",
            fix=f"{guess}`allhands explain` lists them all",
        )
    return _LINK.sub(r"\1", page(slug))


def index() -> str:
    """Return the contents of ``docs/diagnoses.md``: every diagnosis with its exception, linked to its page."""
    lines = [
        "# Diagnoses",
        "",
        "Every error of allhands ends its first line with a name in brackets, such as `[missing-ranks]`. The name is",
        "stable: it never changes its meaning. `allhands explain NAME` prints the page that is linked here.",
    ]
    for heading, entries in _sections():
        lines += ["", f"## {heading}", "", "| name | exception | meaning |", "| --- | --- | --- |"]
        for slug, error, meaning in entries:
            raised = "none: reported by `allhands doctor`" if error == "AllhandsError" else f"`{error}`"
            lines.append(f"| [{slug}]({_PAGES}/{slug}.md) | {raised} | {meaning} |")
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, list[Entry]]]:
    heading, entries = "", list[Entry]()
    for entry in CATALOGUE.values():
        if entry.slug in _SECTIONS:
            if entries:
                yield heading, entries
            heading, entries = _SECTIONS[entry.slug], []
        entries.append(entry)
    yield heading, entries
