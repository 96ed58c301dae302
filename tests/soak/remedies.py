"""Applying fixes: each function gets the match of a message's `fix:` and changes only what it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ranks.harness import free_port
from soak.laboratory import Change, Fix, Site

__all__ = ["ADDRESS", "AGAIN", "code", "exported", "other_port", "removed", "started", "unset"]


def code(says: str) -> Fix:
    """Return the fix that changes lines of the script, or what is installed: it is then written as it should be."""
    return Fix(says, lambda _, __: Change({"FAULTY": "0"}))


def _again(_: Site, __: re.Match[str]) -> Change:
    return Change({"FAULTY": "0"})


# The message states that nothing can be changed in the job itself: the same job is run once more.
AGAIN = Fix("run the job again", _again, again=True)


def started(says: str) -> Fix:
    """Return the fix that starts the rank which is missing: those in ABSENT do not come."""
    return Fix(says, lambda _, __: Change({"ABSENT": None}))


def unset(says: str) -> Fix:
    """Return the fix that unsets the variables which the group ``names`` of the pattern holds."""
    return Fix(says, lambda _, match: Change(dict.fromkeys(match["names"].split())))


def exported(says: str, value: str | None = None) -> Fix:
    """Return the fix that sets the variable ``name`` on every rank; without a value, to a free port."""
    return Fix(says, lambda _, match: Change({match["name"]: value if value is not None else str(free_port())}))


def other_port(says: str) -> Fix:
    """Return the fix that uses another port."""
    return Fix(says, lambda _, __: Change({"METHOD": f"tcp://127.0.0.1:{free_port()}"}))


def removed(says: str) -> Fix:
    """Return the fix that runs the command `rm` of the message."""

    def do(_: Site, match: re.Match[str]) -> Change:
        assert Path(match["path"]).exists()
        subprocess.run(["rm", match["path"]], check=True)  # noqa: S607  # as people type it
        return Change()

    return Fix(says, do)


def _address(site: Site, _: re.Match[str]) -> Change:
    return Change({"METHOD": site.method})


# The address of rank 0's machine is given in the place of what was.
ADDRESS = Fix(
    "address of rank 0's machine( itself| on a network that this machine is in)? as MASTER_ADDR or init_method",
    _address,
)
