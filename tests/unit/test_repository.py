"""Rules for the files of the repository themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folders of the machine that something was written on; no one else has them.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|root)/")


def text_files() -> dict[Path, str]:
    """Return the repository's text files, tracked or about to be, with their contents."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607  # git is on PATH
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files: dict[Path, str] = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        try:
            files[path] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return files


def test_no_file_speaks_of_one_machine() -> None:
    """No file names a folder that exists only where it was written."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in text_files().items()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
