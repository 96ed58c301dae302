"""One finding about why a group could not form, or ended: the object behind every error, log line and report.

A diagnosis is plain data that travels on the wire, so every rank can be given the same one.
"""

from __future__ import annotations

import msgspec

__all__ = ["Diagnosis"]


class Diagnosis(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened, who is concerned, why, and how to mend it.

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
        """Put the diagnosis into the words that a user sees, headed by ``title`` (the exception's name)."""
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
