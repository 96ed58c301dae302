"""What one contestant of `allhands bench ddp` took in one spell of training. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Spell"]


class Spell(NamedTuple):
    """Seconds of a step on the slowest rank: of all steps, of the shortest; and the core time of one, of all ranks."""

    step_s: float
    least_s: float
    cores_s: float
