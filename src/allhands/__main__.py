"""``python -m allhands``: the command line, where the `allhands` script is not on PATH."""

from .cli import main

__all__: list[str] = []

if __name__ == "__main__":
    # Usage lines name the program as the user would type it, not the path of this file.
    main(prog_name="python -m allhands")
