"""The recipes' READMEs hold together: the index names every recipe, its command and the test that runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes import CLUSTERS

ROOT = CLUSTERS.parents[1]
INDEX = (CLUSTERS / "README.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in INDEX.splitlines() if line.startswith("| ") and "`tests/" in line]


def test_every_recipe_is_in_the_index() -> None:
    """Every folder has a README that the index links, and that names its test."""
    folders = sorted(path.name for path in CLUSTERS.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert sorted({*re.findall(r"\]\((\w+)/README\.md\)", INDEX)}) == folders
    for folder in folders:
        assert re.search(r"\b[Rr]un by `tests/", (CLUSTERS / folder / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(CLUSTERS.rglob("README.md")), ids=lambda path: path.parent.name)
def test_links_and_tests_exist(path: Path) -> None:
    """Every link leads to a file, and every test that is named is one."""
    text = path.read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text) if not (path.parent / link).exists()] == []
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    assert named
    assert [test for test in named if not (ROOT / test).exists()] == []


def test_the_index_agrees_with_the_recipes() -> None:
    """Each command of the index is one of its recipe, and the test that the index names reads that recipe."""
    assert len(ROWS) == 12
    for _, recipe, command, tests in ROWS[1:]:
        folder = re.findall(r"^\[(\w+)\]", recipe)[0]
        text = (CLUSTERS / folder / "README.md").read_text(encoding="utf-8")
        (typed,) = re.findall(r"`([^`]+)`", command.removeprefix("see there: `MASTER_ADDR` and `MASTER_PORT`")) or [""]
        assert typed in text, typed
        for test in re.findall(r"`(tests/[^`]+)`", tests):
            source = (ROOT / test).read_text(encoding="utf-8")
            assert f'"{folder}"' in source or f"{folder}/" in source, f"{test} does not run {folder}"
