"""Who am I: the environments in which a process can find itself, and which of them is believed.

One file is one environment; `base` has the interface and says which pairs of sources may differ. Nothing here
writes to the environment, resolves names or connects to anything, but for the metadata server of Compute Engine.
"""

from __future__ import annotations

__all__: list[str] = []
