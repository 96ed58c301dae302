"""The recurring trap: a RANK that counts nodes where several processes per node are meant."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import AllhandsError, fail
from .base import me, text

__all__ = ["node_not_process", "several"]

# Set by platforms and manifests to say how many processes a node shall have; none of them starts any.
_MEANT = ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "PET_NPROC_PER_NODE")


def several(env: Mapping[str, str]) -> str:
    """Return the variable that asks for more than one process per node, as NAME=VALUE, or ""."""
    for name in _MEANT:
        value = text(env, name)
        if value.isdecimal() and int(value) > 1:
            return f"{name}={value}"
    return ""


def node_not_process(counted: str, evidence: str, where: str) -> AllhandsError:
    """Return the error: ``counted`` (RANK=1) numbers nodes ``where``, but ``evidence`` asks for more processes."""
    return fail(
        "node-not-process",
        f"{counted} counts nodes, but several processes per node are meant",
        who=me(),
        why=f"{where}; {evidence}. All processes of a node would claim the same rank",
        fix="start the script on every node through a launcher that numbers the processes (torchrun, or "
        "allhands' own)\nor pass rank= and world_size=, or ask for one process per node",
    )
