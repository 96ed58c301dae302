"""Rules that hold for every test: nothing may be left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import hypothesis
import pytest

import leaks
from ranks import harness

# Its own deadline for an example, 200 ms, is a tight time where three files run on two cores.
hypothesis.settings.register_profile("allhands", deadline=None)
hypothesis.settings.load_profile("allhands")


def pytest_configure() -> None:
    """Adopt orphans of killed processes, and restore the default handling of SIGINT and SIGHUP for processes of tests.

    A background process of a shell ignores SIGINT, one of `nohup` SIGHUP, and so would its children.
    """
    leaks.adopt_orphans()
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, usual)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that left a process, a listening port, a Unix socket or a shared-memory file of ours.

    What a fixture of wider scope had started before the test does not count.
    """
    before = leaks.snapshot()
    yield
    found = leaks.left_behind(before)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Import torch once for the ranks of all tests; started before a test counts what it leaves behind."""
    harness.fork_server()
    yield
    harness.end_fork_server()
