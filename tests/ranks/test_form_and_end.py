"""A group can be formed and ended again and again; `tests/soak` does so two hundred times with eight ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.repeated_lifecycle import METHODS, cycle

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("method", METHODS)
def test_groups_come_and_go(method: str, tmp_path: Path) -> None:
    """Eight ranks form, use and end a group five times in a row: none fails and nothing is left behind."""
    cycle(8, 5, method, tmp_path, timeout=40)
