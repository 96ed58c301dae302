"""The coordinator's process is killed while ranks are in one small collective after the other, many times over."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak.group_faults import FAULTS
from soak.laboratory import AT_ONCE_S, Site, told

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

# Without a wait that ends with the group, a rank got the error only at its timeout in about one round of seven.
ROUNDS = 30

KILLED = next(fault for fault in FAULTS if fault.slug == "coordinator-lost")


def test_every_rank_gets_the_diagnosis_at_once(tmp_path: Path) -> None:
    """Wherever in Gloo's steps the connections end, no rank stays in its collective."""
    for _ in range(ROUNDS):
        found = told(KILLED, Site(tmp_path).moved(), "allhands")
        assert [each["slug"] for each in found.values()] == ["coordinator-lost"] * KILLED.count
        assert max(each["after"] for each in found.values()) < AT_ONCE_S, found
