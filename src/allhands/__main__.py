"""Entry point of `allhands` and ``python -m allhands``.

`allhands run` bypasses `cli`, to start workers before it imports what the command line needs (see `launch.start`).
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(program: str = "allhands") -> None:
    """Run the command line and exit. ``program`` is its name in usage lines."""
    if sys.argv[1:2] == ["run"]:
        status = _run(sys.argv[2:])
        if status is not None:
            sys.exit(status)
    from .cli import main as command_line

    command_line(prog_name=program)


def _run(line: list[str]) -> int | None:
    from .launch.start import run_command_line

    try:
        return run_command_line(line)
    except Exception as problem:
        from .errors import AllhandsError

        if not isinstance(problem, AllhandsError):
            raise
        from .cli import failed

        return failed(problem)


if __name__ == "__main__":
    # Usage lines show the program as users type it, not the path of this file.
    main("python -m allhands")
