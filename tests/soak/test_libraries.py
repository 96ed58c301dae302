"""Lightning, Accelerate and the Trainer under `allhands run`, installed from PyPI, with the installed torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.machine import Machine, finish, typed
from recipes import block, blocks, copy

pytestmark = pytest.mark.soak

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# What is already here and must stay as it is; another torch would bring gigabytes of CUDA along.
OURS = {"torch", "allhands", "numpy"}


def _pip(*words: str) -> str:
    whole = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install from PyPI here: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the packages of the README into the test's folder: those that are missing, and no dependency twice."""
    folder = tmp_path_factory.mktemp("libraries")
    plan = folder / "plan.json"
    wanted = block("libraries", "pip install").split()[2:]
    _pip("install", "--quiet", "--dry-run", "--report", str(plan), "-c", str(CONSTRAINTS), *wanted)
    found = {
        each["metadata"]["name"].lower(): each["metadata"]["version"]
        for each in json.loads(plan.read_text(encoding="utf-8"))["install"]
    }
    assert {*wanted} <= {*found}
    assert not OURS & {*found}
    assert not [name for name in found if name.startswith(("nvidia", "triton"))]
    exact = [f"{name}=={version}" for name, version in found.items()]
    _pip("install", "--quiet", "--no-deps", "--target", str(folder / "site"), *exact)
    return folder / "site"


@pytest.mark.parametrize("command", [each for each in blocks("libraries") if "allhands run" in each])
def test_a_library_trains(libraries: Path, tmp_path: Path, command: str) -> None:
    """The recipe's command trains to the end on two ranks, with the requested backend."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(libraries)]))
    # Nothing is looked up on a hub, and no progress bar is drawn over the output.
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "TQDM_DISABLE": "1"}
    with typed(Machine(None, "library", tmp_path, env).type(command, cwd=copy(tmp_path))) as begun:
        (said,) = finish(begun, 240)
    lines = [line for line in said.splitlines() if "trained with" in line]
    assert len(lines) == 2, said
    assert all("2 ranks, backend allhands" in line for line in lines)
