"""The commands of the recipes in examples/clusters, read out of their READMEs: what is shown is what is run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["CLUSTERS", "block", "blocks", "copy"]

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"


def blocks(recipe: str) -> list[str]:
    """Return the commands in the README of ``recipe``, block by block."""
    text = (CLUSTERS / recipe / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def block(recipe: str, having: str) -> str:
    """Return the one block of ``recipe`` that has ``having`` in it."""
    found = [each for each in blocks(recipe) if having in each]
    assert len(found) == 1, f"{recipe}/README.md has {len(found)} blocks with {having!r} in them"
    return found[0]


def copy(folder: Path) -> Path:
    """Copy the recipes into ``folder``, so that what they write is not left in the repository; return where."""
    return Path(shutil.copytree(CLUSTERS, folder / "clusters", ignore=shutil.ignore_patterns("__pycache__")))
