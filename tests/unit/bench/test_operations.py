"""The arithmetic of a bench: bus bandwidth, bytes of the staged scheme, the floor."""

from __future__ import annotations

import pytest

from allhands.bench.collective import row
from allhands.bench.config import CollectiveConfig
from allhands.bench.operations import OPERATIONS, bus_bandwidth, copied_bytes, copy_speed, floor_s

MIB = 1 << 20


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("all_gather_into_tensor", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("reduce_scatter_tensor", 2, 0.5),
        ("all_to_all", 4, 0.75),
        ("all_to_all_single", 4, 0.75),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("send_recv", 4, 1.0),
        ("barrier", 4, 0.0),
    ],
)
def test_bus_bandwidth(operation: str, ranks: int, factor: float) -> None:
    """It is nccl-tests' factor of each operation, times size over time."""
    assert bus_bandwidth(operation, ranks, MIB, 0.001) == pytest.approx(factor * MIB / 0.001)


@pytest.mark.parametrize(
    ("operation", "ranks", "times"),
    [
        ("all_reduce", 2, 4.0),
        ("all_reduce", 4, 4.5),
        ("reduce", 4, 4.5),
        ("broadcast", 4, 2.0),
        # One part in, all parts out: architecture.md counts S from each.
        ("all_gather", 4, 2.5),
        ("all_gather_into_tensor", 2, 3.0),
        ("reduce_scatter", 4, 2 * (1 - 1 / 4) + 1 + 1 / 4),
        ("all_to_all", 4, 4.0),
        ("gather", 4, 2.0),
        ("scatter", 4, 2.0),
        ("send_recv", 2, 2.0),
        ("barrier", 2, 0.0),
    ],
)
def test_bytes_of_the_staged_scheme(operation: str, ranks: int, times: float) -> None:
    """What the busiest rank loads and stores is what docs/architecture.md says of each operation."""
    assert OPERATIONS[operation].staged.value(MIB, ranks) == pytest.approx(times * MIB)


def test_a_small_all_reduce_goes_in_one_shot() -> None:
    """Up to 64 KiB of all ranks' data everyone reads everyone."""
    assert OPERATIONS["all_reduce"].staged.value(16 << 10, 4) == 7 * (16 << 10)
    assert OPERATIONS["all_reduce"].staged.value((16 << 10) + 4, 4) == pytest.approx(4.5 * ((16 << 10) + 4))


def test_the_floor_is_bytes_over_speed() -> None:
    """A copy of S bytes moves 2 S; small messages are memory against a copy that the cache holds."""
    assert copied_bytes(4) == copied_bytes(64 << 10) == 64 << 10
    assert copied_bytes(MIB) == MIB
    assert copy_speed(MIB, 1e-3) == 2 * MIB / 1e-3
    # 4 S at the speed of 2 S in a millisecond.
    assert floor_s("all_reduce", 2, MIB, 1e-3) == pytest.approx(2e-3)
    assert floor_s("all_reduce", 2, 4, 1e-3) == pytest.approx(20 / (128 << 10) * 1e-3)


def test_a_row_holds_what_was_measured() -> None:
    """Medians and least are over the rounds, ratios over our median, the floor from the medians of the copies."""
    times = {
        "allhands": [3e-3, 1e-3, 2e-3],
        "gloo": [8e-3, 9e-3, 7e-3],
        "memcpy": [1e-4, 1e-4, 1e-4],
        "stream": [9e-4, 5e-4, 1e-4],
    }
    found = row(CollectiveConfig("all_reduce", 4, (MIB,), 3, ("gloo",), floor=True), MIB, times, {"gloo": "torch 2"})
    ours, gloo = found["engines"]["allhands"], found["engines"]["gloo"]
    assert (ours["median_s"], ours["least_s"], ours["ratio"]) == (2e-3, 1e-3, 1.0)
    assert (gloo["median_s"], gloo["least_s"], gloo["ratio"], gloo["version"]) == (8e-3, 7e-3, 4.0, "torch 2")
    assert gloo["bus_bytes_per_s"] == pytest.approx(1.5 * MIB / 8e-3)
    assert found["floor"]["stream_bytes_per_s"] == pytest.approx(2 * MIB / 5e-4)
    assert found["floor"]["floor_s"] == pytest.approx(4.5 / 2 * 5e-4)
    assert found["floor"]["ratio"] == pytest.approx(2e-3 / (4.5 / 2 * 5e-4))
    assert "floor" not in row(CollectiveConfig("all_reduce", 4, (MIB,), 3), MIB, {"allhands": [1e-3]}, {})
