"""torch's own tests of DistributedDataParallel, with our class in the place of torch's; and compiled models."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ranks import harness
from soak.test_torch_suite import GATINGS, run, run_all
from soak.torch_suite import OUR_DDP

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

HERE = Path(__file__).parent

# Tests that wrap a model, by their names.
ABOUT = re.compile(
    r"(?i)(?<!dump_)ddp|DistributedDataParallel|SyncBatchNorm|sync_bn|static_graph|accumulate_gradients|undefined_grad"
)


def test_torch_tests_pass_with_our_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test that wraps a model passes, or is listed in torch_ddp.toml with the reason; none listed there passes."""
    monkeypatch.setenv(OUR_DDP, "1")
    exempt = tomllib.loads((HERE / "torch_ddp.toml").read_text())
    names = [name for name in run([], tmp_path).split() if ABOUT.search(name)]
    assert len(names) > 80
    reasons = {**exempt["fails"], **exempt["slow"]}
    assert not set(reasons) - set(names), "torch has no such tests"
    names = [name for name in names if name not in exempt["slow"]]
    found: dict[str, dict[str, Any]] = {}
    for gating in GATINGS:
        left = [name for name in names if found.get(name, {}).get("outcome", "skipped") == "skipped"]
        found |= run_all(gating, left, tmp_path)
    assert set(found) == set(names)
    passed = {name for name, each in found.items() if each["outcome"] == "passed"}
    print(f"\n{len(names)} tests of DDP, {len(passed)} passed, {len(reasons)} exempt")  # noqa: T201
    bad = {name: each for name, each in found.items() if name not in passed and name not in reasons}
    assert not bad, "\n".join(f"{name} {each['outcome']}: {each['why']}" for name, each in bad.items())
    assert not passed & set(reasons), "these pass now; take them out of torch_ddp.toml"


COMPILED = """
import torch
from torch import nn
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=120)

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2))

def train(model, call):
    torch.manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        call(torch.randn(4, 6)).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]

def inside(ddp):
    return torch.compile(lambda x: ddp(x) * 1.0, backend="aot_eager")

plain = dist.DistributedDataParallel(net())
wanted = train(plain, plain)
inner = dist.DistributedDataParallel(torch.compile(net(), backend="aot_eager"))
outer = dist.DistributedDataParallel(net())
part = dist.DistributedDataParallel(net(), find_unused_parameters=True)
for name, model, call in (("inner", inner, inner), ("outer", outer, torch.compile(outer, backend="aot_eager")),
                          ("part", part, inside(part))):
    found = train(model, call)
    say(**{name: all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(wanted, found))})
    parts = [torch.empty_like(found[0]) for _ in range(size)]
    dist.all_gather(parts, found[0])
    say(**{name + "_alike": torch.equal(*parts)})
dist.destroy_process_group()
"""


def test_compiled_models_train_the_same() -> None:
    """A compiled module that is wrapped, a wrapped one that is compiled, and one called in compiled code."""
    for result in harness.launch(COMPILED, 2, timeout=200):
        assert result.returncode == 0, result.stderr
        for name in ("inner", "outer", "part"):
            assert result[name], result.stdout
            assert result[f"{name}_alike"]


def test_a_small_bench_of_training() -> None:
    """The command trains with every implementation and reports the memory of each."""
    import json
    import subprocess
    import sys

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "allhands",
            "bench",
            "ddp",
            "--ranks",
            "2",
            "--models",
            "mlp",
            "--rounds",
            "1",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=harness.environment({}),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["contestants"].keys() == {"allhands", "torch", "gloo"}
    assert all(each["step_s"] > 0 for each in row["contestants"].values())
    assert all(each > row["bytes"] for each in row["memory_bytes"].values())
