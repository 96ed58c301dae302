"""The Python blocks of the tutorial form one script, which runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import harness

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SCRIPT = "\n".join(re.findall(r"^```python\n(.*?)^```$", TUTORIAL, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_tutorial_runs(ranks: int) -> None:
    """All Python blocks in one script succeed, on one rank and on three."""
    assert SCRIPT.count("\n") > 40
    each = {rank: {"ALLHANDS_RANK": str(rank), "ALLHANDS_WORLD_SIZE": str(ranks)} for rank in range(ranks)}
    for result in harness.launch(SCRIPT, ranks, each=each):
        assert result.returncode == 0, result.stderr


def test_commands_of_the_tutorial_exist() -> None:
    """The options and files in the shell commands are those of the examples."""
    lines = re.findall(r"^allhands run -n \d (examples/\S+)(.*?)(?:#.*)?$", TUTORIAL, flags=re.MULTILINE)
    assert len(lines) == 3
    for path, options in lines:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in source] == []
    for link in re.findall(r"`(examples/\w+\.py)", TUTORIAL):
        assert (ROOT / link).exists()


def test_from_scratch_step_by_step() -> None:
    """The example prints its six steps, and its own data-parallel training agrees with torch's."""
    done = subprocess.run(
        [sys.executable, "-m", "allhands", "run", "-n", "2", "--no-prefix", ROOT / "examples" / "from_scratch.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d)\. ", done.stdout, flags=re.MULTILINE) == list("123456")
    assert done.stdout.count("equal to 3: True") == 2
    last = done.stdout.splitlines()[-2:]
    assert last[0].removeprefix("  rank 0: ") == last[1].removeprefix("  rank 1: ")
    for before, after in re.findall(r"loss (\S+) became (\S+)", done.stdout):
        assert float(after) < float(before) / 2


@pytest.mark.soak
@pytest.mark.parametrize("option", ["", "--fsdp", "--bf16"])
def test_the_language_model_learns(option: str) -> None:
    """On two ranks, copied or sharded, in either type, the model predicts the text better than at its beginning."""
    command = [sys.executable, "-m", "allhands", "run", "-n", "2", "--no-prefix", ROOT / "examples" / "transformer.py"]
    done = subprocess.run(
        [*command, "--steps", "20", *filter(None, [option])],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        # Virtual machines may announce AMX without having it.
        env=harness.environment({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    )
    assert done.returncode == 0, done.stderr
    bits = [float(text) for text in re.findall(r": (\S+) bits for each byte", done.stdout)]
    assert len(bits) == 2
    assert bits[1] < bits[0] - 2
