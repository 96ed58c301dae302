from __future__ import annotations

import pytest

from ranks.runner import run

pytestmark = pytest.mark.soak


def test_a_hundred_launches() -> None:
    """100 jobs of 8 ranks in a row: none fails, and nothing is left (which every test is held to)."""
    for _ in range(100):
        ran = run("import os; print('rank', os.environ['RANK'])", ranks=8)
        assert ran.code == 0, ran.err
        assert sorted(ran.out.splitlines()) == [f"[{rank}] rank {rank}" for rank in range(8)]
