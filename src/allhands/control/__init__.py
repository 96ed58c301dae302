"""The control plane: who is in the job, who fell, and the key-value store. Knows nothing of tensors or torch.

Imports nothing until it is used: a rank under a launcher needs no coordinator, and every rank waits for its imports.
"""

from __future__ import annotations

import importlib

# Not from typing: type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .coordinator import Coordinator
    from .meeting import Board, FileBoard, Notice
    from .member import Member
    from .messages import Claim
    from .roll import Seat, answer

__all__ = ["Board", "Claim", "Coordinator", "FileBoard", "Member", "Notice", "Seat", "answer"]

_HOMES = {
    "Board": ".meeting",
    "Claim": ".messages",
    "Coordinator": ".coordinator",
    "FileBoard": ".meeting",
    "Member": ".member",
    "Notice": ".meeting",
    "Seat": ".roll",
    "answer": ".roll",
}


def __getattr__(name: str) -> Any:
    """Find ``name`` where it lives, when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
