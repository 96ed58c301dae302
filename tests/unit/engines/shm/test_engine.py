"""The shared-memory engine's own decisions."""

from __future__ import annotations

from allhands.engines.shm.engine import spare_threads


def test_spare_cores_become_helper_threads() -> None:
    """Each rank gets an equal part of the cores that no rank uses, at most three; a single rank gets none."""
    assert [spare_threads(ranks, 16) for ranks in (1, 2, 4, 5, 8, 16, 32)] == [0, 3, 3, 2, 1, 0, 0]
    assert [spare_threads(ranks, 2) for ranks in (1, 2, 4)] == [0, 0, 0]
