"""``python -m allhands.control``: the coordinator's process. Started by rank 0, not by hand."""

import sys

from .coordinator_process import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
