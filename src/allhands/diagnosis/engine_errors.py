"""What the engines say when a connection ended under them, or time was up: words that only pass on another's end."""

from __future__ import annotations

import re

__all__ = ["TIMEOUT", "TRANSPORT"]

# Gloo raises plain RuntimeError, so its words are all there is to tell it by.
TRANSPORT = re.compile(
    r"gloo/(transport|rendezvous)|connection (closed|reset|refused)|broken pipe|timed ?out|wait timeout|"
    r"application timeout|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|NCCL error",
    re.IGNORECASE,
)
TIMEOUT = re.compile(r"timed ?out|timeout", re.IGNORECASE)
