"""Entry point of `allhands` and ``python -m allhands``.

`allhands run` bypasses `cli`, to start workers before it imports what the command line needs (see `launch.start`).
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(program: str = "allhands") -> None:
    """Run the command line and exit. ``program`` is its name in usage lines."""
    if sys.argv[1:2] == ["run"]:
        from .launch.start import run_command_line

        try:
            status = run_command_line(sys.argv[2:])
        except Exception as problem:
            from .errors import AllhandsError

            if not isinstance(problem, AllhandsError):
                raise
            from .cli import failed

            status = failed(problem)
        if status is not None:
            sys.exit(status)
    from .cli import main as command_line

    command_line(prog_name=program)


if __name__ == "__main__":
    # Usage lines show the program as users type it, not the path of this file.
    main("python -m allhands")
