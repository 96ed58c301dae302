"""Every example of docs/lifecycle.md runs unchanged and prints the output on the page."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import harness

PAGE = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")

# A comment with the way to run the script, the script, its output, and the behaviour of torch alone.
EXAMPLE = re.compile(
    r"<!-- ranks (?P<ranks>\d)(?P<launched>, launched)?(?:; exit (?P<codes>[-\d ]+))? -->\n"
    r"```python\n(?P<script>.*?)^```\n\n"
    r"```text\n(?P<output>.*?)^```\n\n"
    r"\*torch alone:\* ",
    flags=re.DOTALL | re.MULTILINE,
)

# An example may only use what the page shows, so the names that the harness defines are deleted.
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


def examples() -> list[Example]:
    """Return the page's examples."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        for part in EXAMPLE.finditer(section):
            ranks = int(part["ranks"])
            codes = [int(code) for code in part["codes"].split()] if part["codes"] else [0] * ranks
            title = section.partition("\n")[0]
            found.append(Example(title, part["script"], part["output"], ranks, bool(part["launched"]), codes))
    return found


EXAMPLES = examples()


def test_every_section_has_an_example() -> None:
    """No script on the page is left out by the pattern above."""
    assert [each.title for each in EXAMPLES] == re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    assert len(EXAMPLES) == PAGE.count("```python") >= 6


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    "example",
    EXAMPLES,
    ids=lambda each: each.title,
)
def test_the_example_runs(example: Example) -> None:
    """It prints the output on the page, rank after rank, and each rank has the exit status on the page."""
    size = str(example.ranks)
    claims = {rank: {"ALLHANDS_RANK": str(rank), "ALLHANDS_WORLD_SIZE": size} for rank in range(example.ranks)}
    results = harness.launch(BEFORE + example.script, example.ranks, each=claims if example.launched else {})
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
    """Under `allhands run` the examples for a launcher print the same lines, in any order."""
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
