"""Errors of Gloo and NCCL, recognised by their text: torch raises plain RuntimeError. Only this module reads it.

Imports no torch.
"""

from __future__ import annotations

import re

from .base import EngineFailure, EngineTimeout, TransportFailure

__all__ = ["classify", "duplicate_gpu", "failure_of"]

_TRANSPORT = re.compile(
    r"gloo/(transport|rendezvous)|connection (closed|reset|refused)|broken pipe|timed ?out|wait timeout|"
    r"application timeout|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|NCCL error",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed ?out|timeout", re.IGNORECASE)


def classify(text: str) -> type[EngineFailure] | None:
    """Return the kind of failure that an error message reports: a timeout or a lost connection; None for neither."""
    if not _TRANSPORT.search(text):
        return None
    return EngineTimeout if _TIMEOUT.search(text) else TransportFailure


def failure_of(problem: BaseException) -> EngineFailure | None:
    """Return the failure behind ``problem``, None where it is the caller's own mistake."""
    kind = classify(str(problem)) if isinstance(problem, RuntimeError) else None
    return kind(str(problem)) if kind is not None else None


def duplicate_gpu(problem: BaseException) -> str:
    """Return NCCL's message where it refused because ranks use the same GPU, "" for other problems."""
    return next((line.strip() for line in str(problem).splitlines() if "Duplicate GPU detected" in line), "")
