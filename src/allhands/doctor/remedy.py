"""What --fix does: only what is safe and can be undone. Everything else is printed, for people to type."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from .finding import Finding
from .proc_status import look

__all__ = ["apply"]


def apply(findings: Sequence[Finding]) -> dict[str, str]:
    """Do what can be done safely; return what was done, or why not, by check."""
    done: dict[str, str] = {}
    for found in findings:
        if found.check == "descriptors" and found.level == "yellow":
            done[found.check] = _raise_descriptors()
    return done


def _raise_descriptors() -> str:
    """Raise the soft limit of the shell that called us, to what it may have: jobs that it starts inherit it."""
    shell = os.getppid()
    seen = look(shell)
    if seen is None or seen.uid != os.getuid() or shell == 1:
        return "nothing: the process that called this one is not yours"
    soft, hard = resource.prlimit(shell, resource.RLIMIT_NOFILE)
    if hard == soft:
        return f"nothing: {seen.name} (pid {shell}) has all {soft} that it may have"
    try:
        resource.prlimit(shell, resource.RLIMIT_NOFILE, (hard, hard))
    except OSError as problem:
        return f"nothing: {problem.strerror or problem}"
    return f"raised the limit of {seen.name} (pid {shell}) from {soft} to {hard}; `ulimit -Sn {soft}` there undoes it"
