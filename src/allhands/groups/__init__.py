"""The process group registered with torch: its lifecycle, its collectives and messages, and how it fails.

The package is not called ``group``: an imported submodule becomes an attribute of its parent, and ``allhands.group``
must stay ``torch.distributed.group``, which programs use as ``dist.group.WORLD``.
"""

from __future__ import annotations

__all__: list[str] = []
