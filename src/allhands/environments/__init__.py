"""Which rank is this process: one module per launch environment, and the rules that select one of them.

Nothing here writes to the environment, resolves names or connects to anything but Compute Engine's metadata server.
"""

from __future__ import annotations

__all__: list[str] = []
