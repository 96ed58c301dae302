"""Every example of docs/lifecycle.md is run as it stands, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import harness

PAGE = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")

# A comment says how the script is run; then come the script, what it prints, and what torch would do.
EXAMPLE = re.compile(
    r"<!-- ranks (?P<ranks>\d)(?P<launched>, launched)?(?:; exit (?P<codes>[-\d ]+))?(?P<slow>; slow)? -->\n"
    r"```python\n(?P<script>.*?)^```\n\n"
    r"```text\n(?P<output>.*?)^```\n\n"
    r"\*torch alone:\* ",
    flags=re.DOTALL | re.MULTILINE,
)

# An example may use nothing that a reader does not see, so the harness's own names are taken away.
BEFORE = "import sys; sys.argv.append(str(rank)); del attempt, children, gate, outcome, rank, say, size\n"


@dataclass(frozen=True)
class Example:
    """One section's script, how it is started, and how it ends."""

    title: str
    script: str
    output: str
    ranks: int
    launched: bool
    codes: list[int]
    slow: bool


def examples() -> list[Example]:
    """Return the page's examples."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        for part in EXAMPLE.finditer(section):
            ranks = int(part["ranks"])
            codes = [int(code) for code in part["codes"].split()] if part["codes"] else [0] * ranks
            title = section.partition("\n")[0]
            launched, slow = bool(part["launched"]), bool(part["slow"])
            found.append(Example(title, part["script"], part["output"], ranks, launched, codes, slow))
    return found


EXAMPLES = examples()


def test_every_section_has_an_example() -> None:
    """No script on the page is left out, whatever is written around it."""
    assert [each.title for each in EXAMPLES] == re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    assert len(EXAMPLES) == PAGE.count("```python") >= 12


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, id=each.title, marks=[pytest.mark.soak] if each.slow else []) for each in EXAMPLES],
)
def test_the_example_runs(example: Example) -> None:
    """It prints what the page says, rank after rank, and each rank ends as the page says."""
    size = str(example.ranks)
    told = {rank: {"ALLHANDS_RANK": str(rank), "ALLHANDS_WORLD_SIZE": size} for rank in range(example.ranks)}
    results = harness.launch(BEFORE + example.script, example.ranks, each=told if example.launched else {})
    words = "\n".join(result.stderr for result in results)
    assert "".join(result.stdout for result in results) == example.output, words
    assert [result.returncode for result in results] == example.codes, words


@pytest.mark.soak
@pytest.mark.parametrize(
    "example",
    [each for each in EXAMPLES if each.launched and not any(each.codes)],
    ids=lambda each: each.title,
)
def test_the_example_runs_under_the_launcher(example: Example, tmp_path: Path) -> None:
    """What is run above with a launcher's variables prints the same lines, in any order, under `allhands run`."""
    script = tmp_path / "script.py"
    script.write_text(example.script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "allhands", "run", "-n", str(example.ranks), "--no-prefix", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=harness.environment({}),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(example.output.splitlines())
