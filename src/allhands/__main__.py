"""The way in: `allhands` and ``python -m allhands``. Everything goes to the command line, `run` by a shorter way.

`allhands run` starts workers before it imports what the command line needs (see `launch.ahead`).
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(program: str = "allhands") -> None:
    """Do what the command line says, and exit. ``program`` is what usage lines call it."""
    if sys.argv[1:2] == ["run"]:
        status = _run(sys.argv[2:])
        if status is not None:
            sys.exit(status)
    from .cli import main as command_line

    command_line(prog_name=program)


def _run(line: list[str]) -> int | None:
    from .launch.start import run

    try:
        return run(line)
    except Exception as problem:
        from .errors import AllhandsError

        if not isinstance(problem, AllhandsError):
            raise
        from .cli import failed

        return failed(problem)


if __name__ == "__main__":
    # Usage lines name the program as the user would type it, not the path of this file.
    main("python -m allhands")
