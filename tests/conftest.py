"""Rules that hold for every test: nothing may be left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import leaks


def pytest_configure() -> None:
    """See orphans of killed processes too."""
    leaks.adopt_orphans()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that left a process, a listening port, a Unix socket or a shared-memory file of ours.

    What a fixture of wider scope had started before the test is not held against it.
    """
    before = leaks.snapshot()
    yield
    found = leaks.left_behind(before)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
