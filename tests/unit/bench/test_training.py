from __future__ import annotations

import pytest

from allhands.bench import training
from allhands.bench.config import DdpConfig, ddp_config
from allhands.bench.tables import ddp_table
from allhands.bench.training import Sample, row
from allhands.errors import ArgumentError


def test_a_model_that_there_is_not() -> None:
    """The nearest name is offered."""
    with pytest.raises(ArgumentError, match="did you mean 'transformer'"):
        ddp_config(2, "mlp,transfomer", 3)


def samples(steps_s: list[float], cores_s: float = 0.020) -> list[Sample]:
    """Return a sample for each, whose shortest step is a tenth shorter."""
    return [Sample(step, step * 0.9, cores_s) for step in steps_s]


def test_a_row_and_its_table() -> None:
    """Communication is the middle of what a step takes more than one in lockstep; ratios are over ours."""
    taken = {
        "allhands": samples([0.012, 0.014, 0.013], 0.022),
        "torch": samples([0.013, 0.014, 0.015]),
        # A round in which everything took longer: the difference is what it is in the others.
        "gloo": samples([0.021, 0.033, 0.022], 0.03),
        "lockstep": samples([0.011, 0.023, 0.012]),
        "apart": samples([0.010, 0.012, 0.011]),
        "single": samples([0.010, 0.010, 0.010]),
    }
    found = row(DdpConfig(2, ("mlp",), 3), "mlp", taken, {"bytes": 4, "tensors": 1})
    ours, gloo = found["contestants"]["allhands"], found["contestants"]["gloo"]
    assert ours["step_s"] == 0.013
    assert ours["least_s"] == pytest.approx(0.0108)
    assert ours["communication_s"] == pytest.approx(0.001)
    # One round is left, which says nothing of what it may be wrong by.
    assert ours["communication_error_s"] is None
    assert gloo["communication_ratio"] == pytest.approx(10)
    # Of each rank.
    assert ours["core_s"] == pytest.approx(0.001)
    assert gloo["core_ratio"] == pytest.approx(5)
    assert gloo["ratio"] == pytest.approx(22 / 13)
    assert found["overhead"] == pytest.approx(0.2)
    text = ddp_table([{**found, "load_before": 0.5, "memory_bytes": {"allhands": 2**20}, "memory_runs": 3}])
    assert "mlp" in text
    assert "median of 3 jobs" in text
    assert "20.0%" in text
    assert "1.0" in text.splitlines()[3]
    assert "±" not in text


def test_wild_rounds_do_not_count() -> None:
    """A quarter at either end is left out, and the rest is averaged; how far that may be off is shown beside it."""
    taken = {who: samples([0.010] * 8) for who in ("lockstep", "torch", "gloo", "apart", "single")}
    taken["allhands"] = samples([0.010 + 0.001 * more for more in (-50, 1, 2, 3, 4, 5, 6, 900)])
    found = row(DdpConfig(2, ("mlp",), 8), "mlp", taken, {"bytes": 4, "tensors": 1})
    ours = found["contestants"]["allhands"]
    assert ours["communication_s"] == pytest.approx(0.0035)
    # Of 2, 2, 2, 3, 4, 5, 5, 5: their standard deviation over the root of 8 and the share that counts, which is a half.
    assert ours["communication_error_s"] == pytest.approx(0.001 * (14 / 7) ** 0.5 / 8**0.5 / 0.5)
    assert "3.50 ±1.00" in ddp_table([{**found, "load_before": 0.5}])


def test_memory_is_the_median_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One job in which the allocator holds more, or less, does not decide; a single round has a single job."""
    memory = {
        "allhands": iter([{"mlp": 9.0}, {"mlp": 3.0}, {"mlp": 2.0}, {"mlp": 8.0}]),
        "torch": iter([{"mlp": 4.0}, {"mlp": 4.0}, {"mlp": 1.0}, {"mlp": 7.0}]),
        "gloo": iter([{"mlp": 5.0}, {"mlp": 6.0}, {"mlp": 7.0}, {"mlp": 6.0}]),
    }
    monkeypatch.setattr(training, "compare", lambda asked, _: [{"model": "mlp", "rounds": asked.rounds}])
    monkeypatch.setattr(training, "memory", lambda _, who: next(memory[who]))
    (row,) = training.measure(DdpConfig(2, ("mlp",), 25), with_memory=True)
    assert row["memory_bytes"] == {"allhands": 3.0, "torch": 4.0, "gloo": 6.0}
    assert row["memory_runs"] == 3
    (row,) = training.measure(DdpConfig(2, ("mlp",), 1), with_memory=True)
    assert row["memory_bytes"] == {"allhands": 8.0, "torch": 7.0, "gloo": 6.0}
