"""What torch calls at the end of `import torch`: makes the backend name `allhands` known, and does nothing else.

It runs in every process that imports torch where allhands is installed, whether or not that process uses
allhands. So it imports nothing beyond what torch has already loaded (`scripts/import_cost.py` measures it).
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["register"]


def _create(options: Any, pg_options: Any) -> Any:
    """Make the backend of one group; torch calls this when a group with the backend `allhands` is formed."""
    from .backend import create

    return create(options, pg_options)


def register() -> None:
    """Register the backend name `allhands` with torch. Harmless when called again, never blocks.

    A failure becomes a warning: a broken allhands must not keep torch from being imported.
    """
    try:
        import torch.distributed as dist

        if dist.is_available():
            # Devices that have a default backend keep it: torch fills in only those that have none.
            dist.Backend.register_backend("allhands", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:  # noqa: BLE001  # whatever it is, `import torch` goes on
        warnings.warn(
            f'allhands could not register its backend, so init_process_group("allhands") will not work: '
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
