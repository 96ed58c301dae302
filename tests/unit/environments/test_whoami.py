from __future__ import annotations

import json

import pytest

from allhands.environments.identify import ENVIRONMENTS
from allhands.environments.whoami import render, report

STEP = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def test_report_gives_every_value_its_reason() -> None:
    """Each value has the place where it was read, and the report can be encoded as JSON."""
    made = json.loads(json.dumps(report(STEP)))
    assert (made["exit_code"], made["source"], made["error"]) == (0, "slurm", None)
    assert made["world"]["rank"] == {"value": 3, "reason": "SLURM_PROCID=3"}
    assert made["world"]["coordinator"]["value"].startswith("n1:")
    assert made["world"]["local_rank"] == {"value": None, "reason": "not given"}
    assert [found["name"] for found in made["survey"]] == [environment.name for environment in ENVIRONMENTS]
    assert [found["name"] for found in made["survey"] if found["believed"]] == ["slurm"]


def test_report_of_an_error() -> None:
    """If the rank cannot be determined, the report has the diagnosis, and the exit code is 1."""
    made = json.loads(json.dumps(report({**STEP, "RANK": "0"})))
    assert (made["exit_code"], made["error"]["slug"], made["world"]) == (1, "launcher-mismatch", {})
    assert not any(found["believed"] for found in made["survey"])
    text = render(made)
    assert text.startswith("WorldError: two sources disagree")
    assert "[launcher-mismatch]" in text
    assert "\n  fix:  " in text


def test_report_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, the process's own environment is reported."""
    monkeypatch.setenv("ALLHANDS_RANK", "1")
    monkeypatch.setenv("ALLHANDS_WORLD_SIZE", "2")
    assert report()["source"] == "allhands"


def test_report_holds_no_secret() -> None:
    """The job's token appears nowhere, neither in the data nor in the text."""
    made = report({**STEP, "ALLHANDS_TOKEN": "open-sesame-7391"})
    assert "open-sesame" not in json.dumps(made) + render(made)


def test_render_is_aligned() -> None:
    """Values and reasons are aligned, and values without value and reason are left out."""
    lines = render(report(STEP)).splitlines()
    rank = next(line for line in lines if line.startswith("rank"))
    size = next(line for line in lines if line.startswith("world_size"))
    assert rank.index("SLURM_PROCID") == size.index("SLURM_STEP_NUM_TASKS")
    assert not any(line.startswith("local_rank") for line in lines)
    assert any(line.split()[:2] == ["slurm", "believed"] for line in lines)
    assert any(line.split()[:2] == ["torchrun", "no"] for line in lines)


@pytest.mark.parametrize(
    "env",
    [
        STEP,
        {},
        {"SM_HOSTS": '["a","b"]', "SM_CURRENT_HOST": "a"},
        {"JOBSET_NAME": "j", "REPLICATED_JOB_NAME": "r", "JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"},
        {"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2", "ALLHANDS_COORDINATOR": "unix:x", "ALLHANDS_JOB": "j"},
    ],
)
def test_every_value_has_a_reason(env: dict[str, str]) -> None:
    """Each value has a reason."""
    world = report(env)["world"]
    assert world
    for name, told in world.items():
        known = told["value"] is not None and told["value"] is not False and told["value"] != ""
        assert not known or told["reason"] != "not given", name


def test_render_alone() -> None:
    """The output for a single process names the reason."""
    assert "nothing in the environment indicates other processes" in render(report({}))
