from __future__ import annotations

import pytest

from allhands.bench.course import Course, course
from allhands.bench.figures import figures
from allhands.bench.training import row
from allhands.errors import ArgumentError


def test_a_model_that_there_is_not() -> None:
    """The nearest name is offered."""
    with pytest.raises(ArgumentError, match="did you mean 'transformer'"):
        course(2, "mlp,transfomer", 3)


def test_a_row_and_its_table() -> None:
    """Communication is the middle of what a step takes more than one in lockstep; ratios are over ours."""
    times = {
        "allhands": [0.012, 0.014, 0.013],
        "torch": [0.013, 0.014, 0.015],
        # A round in which everything took longer: the difference is what it is in the others.
        "gloo": [0.021, 0.033, 0.022],
        "lockstep": [0.011, 0.023, 0.012],
        "apart": [0.010, 0.012, 0.011],
        "single": [0.010, 0.010, 0.010],
    }
    cores = {who: [0.020, 0.020, 0.020] for who in times} | {"gloo": [0.03] * 3, "allhands": [0.022] * 3}
    found = row(Course(2, ("mlp",), 3), "mlp", times, cores, {"bytes": 4, "tensors": 1})
    ours, gloo = found["contestants"]["allhands"], found["contestants"]["gloo"]
    assert ours["step_s"] == 0.013
    assert ours["communication_s"] == pytest.approx(0.001)
    assert gloo["communication_ratio"] == pytest.approx(10)
    # Of each rank.
    assert ours["core_s"] == pytest.approx(0.001)
    assert gloo["core_ratio"] == pytest.approx(5)
    assert gloo["ratio"] == pytest.approx(22 / 13)
    assert found["overhead"] == pytest.approx(0.2)
    text = figures([{**found, "load_before": 0.5, "memory_bytes": {"allhands": 2**20}}])
    assert "mlp" in text
    assert "20.0%" in text
    assert "1.0" in text.splitlines()[3]


def test_wild_rounds_do_not_count() -> None:
    """A quarter at either end is left out, and the rest is averaged."""
    times = {who: [0.010] * 8 for who in ("lockstep", "torch", "gloo", "apart", "single")}
    times["allhands"] = [0.010 + 0.001 * more for more in (-50, 1, 2, 3, 4, 5, 6, 900)]
    found = row(Course(2, ("mlp",), 8), "mlp", times, {who: [0.0] * 8 for who in times}, {"bytes": 4, "tensors": 1})
    assert found["contestants"]["allhands"]["communication_s"] == pytest.approx(0.0035)
