"""The error that README.md shows is the one that the program prints."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ranks import harness

README = Path(__file__).parents[2] / "README.md"

TRAIN = """\
import torch

import allhands as dist

dist.init_process_group()
rank = dist.get_rank()
gradient = torch.ones(8)

data = open(f"shard-{rank}.bin", "rb").read()
dist.all_reduce(gradient)
"""


def shown() -> str:
    """Return the error of README.md."""
    blocks = re.findall(r"^```text\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "[peer-failed]" in block]
    return str(found)


def normalised(text: str) -> str:
    """Return ``text`` without folders, pids, the host name, and frames inside allhands.

    Those frames depend on whether the rank was already waiting in the call when the failure arrived.
    """
    text = re.sub(r'"[^"\n]*/train\.py"', '"train.py"', text)
    text = re.sub(r'(\[rank0\]:)   File "[^"\n]*/?allhands/[^\n]*\n\1     [^\n]*\n', "", text)
    text = re.sub(r"\(\S+, pid \d+\)", "(node-a, pid N)", text)
    return text.replace(socket.gethostname(), "node-a")


def printed(folder: Path) -> str:
    """Run four ranks of which rank 2 lacks its file; return what rank 0 prints."""
    (folder / "train.py").write_text(TRAIN)
    for rank in (0, 1, 3):
        (folder / f"shard-{rank}.bin").touch()
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env=harness.environment({"RANK": str(rank), "WORLD_SIZE": "4", "ALLHANDS_JOB": f"readme-{os.getpid()}"}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    errors = [process.communicate(timeout=harness.DEADLINE_S)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1, 1, 1]
    lines = errors[0].splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines) if "Traceback" in line)
    return "".join(line for line in lines[begin:] if not harness.WAITING.match(line))


def test_readme_shows_the_error_that_is_printed(tmp_path: Path) -> None:
    """The traceback in README.md is that of rank 0, but for folders, pids, the host name and our own frames."""
    assert normalised(printed(tmp_path)) == normalised(shown())
