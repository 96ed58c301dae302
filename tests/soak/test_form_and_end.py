"""Eight ranks on one host, two hundred groups in a row."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ranks.repeated_lifecycle import METHODS, cycle

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

TURNS = 200


@pytest.mark.parametrize("method", METHODS)
def test_two_hundred_groups_of_eight(method: str, tmp_path: Path) -> None:
    """Eight ranks form, use and end a group two hundred times in a row: none fails and nothing is left behind."""
    begun = time.monotonic()
    slowest = cycle(8, TURNS, method, tmp_path, timeout=600)
    seconds = time.monotonic() - begun
    print(f"\n{method}: {TURNS} groups of 8 in {seconds:.0f} s, slowest {slowest:.2f} s")  # noqa: T201
