"""What README.md shows is true: its Python runs, its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from allhands.diagnosis import CATALOGUE

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
COMMAND = Path(sys.executable).with_name("allhands")


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of README.md in ``language``, indented ones (in lists) too."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    found = re.findall(rf"^([ ]*)```{language}[ ]*\n(.*?)^\1```[ ]*$", text, flags=re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) + "\n" for indent, body in found]


def commands() -> list[str]:
    """Return the commands in sh blocks that call allhands: prompts, comments and assignments removed."""
    found: list[str] = []
    for block in blocks("(?:sh|bash|shell|console)"):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"^\s*(\$\s+)?(\w+=\S*\s+)*", "", line)
            if re.match(r"allhands(\s|$)", words):
                found.append(words)
    return found


PYTHON = blocks("python")


def test_readme_shows_python() -> None:
    """README.md has at least one Python block, so the next test holds something."""
    assert PYTHON


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_runs(number: int, tmp_path: Path) -> None:
    """Each Python block is a script that runs on its own and ends well, alone, within a minute."""
    script = tmp_path / "script.py"
    script.write_text(PYTHON[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_exist(command: str) -> None:
    """Each `allhands` command that is shown is one that the command line knows."""
    words = shlex.split(command, comments=True)[1:]
    subcommand = [words[0]] if words and not words[0].startswith("-") else []
    done = subprocess.run([COMMAND, *subcommand, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_ten_lines_are_the_example() -> None:
    """The script that is shown is the one in examples/, which the tests run under torchrun, and has ten lines."""
    script = (ROOT / "examples" / "ten_lines.py").read_text(encoding="utf-8")
    assert script in PYTHON
    assert len(list(filter(None, script.splitlines()))) == 10


def test_diagnoses_that_are_named_exist() -> None:
    """Every diagnosis in the table of faults and in the error of README.md is in the catalogue."""
    text = README.read_text(encoding="utf-8") + (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `([a-z-]+)`: ", text) + re.findall(r"   \[([a-z-]+)\]$", text, flags=re.MULTILINE)
    assert len(named) >= 8
    assert [slug for slug in named if slug not in CATALOGUE] == []


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("architecture", "environment", "migrating", "performance")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("README.md")),
    "csrc/README.md",
]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    """Every link to a file of the repository leads to one."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


def test_make_targets_exist() -> None:
    """Every `make` target that README.md or CONTRIBUTING.md names is one."""
    text = README.read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"demo", "test"} <= targets <= known


def test_pages_are_short() -> None:
    """README.md has about 120 lines, the architecture about 200, the README of a package at most 60."""
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in PAGES}
    most = {"README.md": 130, "docs/architecture.md": 220, "csrc/README.md": 90}
    packages = {name: 60 for name in PAGES if name.startswith("src/")}
    assert {name: lengths[name] for name, limit in {**packages, **most}.items() if lengths[name] > limit} == {}
