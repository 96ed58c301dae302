from __future__ import annotations

from typing import Any

from allhands.bench.tables import rollcall_table


def row(members: int, per_member: float) -> dict[str, Any]:
    """Return a row in which everything takes ``per_member`` microseconds a member."""
    seconds = members * per_member / 1e6
    return {
        "members": members,
        "rounds": 3,
        "transport": "tcp",
        "kib_per_member": 3.5,
        "coordinator_cpu_us_per_member": per_member,
        **{f"{name}_s": seconds for name in ("rollcall", "store", "death", "leave")},
        **{f"{name}_us_per_member": per_member for name in ("rollcall", "store", "death", "leave")},
    }


def test_columns_are_aligned() -> None:
    """Every line of the table is as wide as its heading, whatever the figures."""
    lines = rollcall_table([row(64, 999.4), row(4096, 12_345.6)]).splitlines()
    table = lines[: lines.index("")]
    assert len(table) == 5
    assert {len(line) for line in table} == {len(table[0])}
    assert table[-1].split()[0] == "4,096"
    assert table[-1].split()[2] == "12,346"


def test_growth_is_taken_against_1024() -> None:
    """The time per member at the largest number is compared with that at 1,024, where fixed costs no longer show."""
    text = rollcall_table([row(64, 900.0), row(1024, 300.0), row(4096, 330.0)])
    assert "at 4,096 over that at 1,024 (1 is linear growth): roll call 1.10, its CPU 1.10, store 1.10" in text


def test_growth_without_1024_takes_the_smallest() -> None:
    """Where 1,024 was not measured the smallest number stands in for it; one row alone has no growth."""
    assert "at 256 over that at 16" in rollcall_table([row(256, 200.0), row(16, 100.0)])
    assert "over that at" not in rollcall_table([row(256, 200.0)])
    assert rollcall_table([]) == "nothing was measured"
