"""Rules that hold for every test: nothing may be left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import hypothesis
import pytest

import leaks

# Its own deadline for an example, 200 ms, is a tight time where three files run on two cores.
hypothesis.settings.register_profile("allhands", deadline=None)
hypothesis.settings.load_profile("allhands")

# Tests that wait long, or say in another way what the one beside them says: `make soak` runs them too, `make test` has
# twelve minutes on two cores.
LONG = (
    "test_hosts.py::test_a_pulled_cable_is_noticed",
    "test_doctor.py::test_an_address_that_does_not_answer_beside_one_that_does",
    "test_doctor.py::test_large_packets_that_vanish",
    "test_doctor.py::test_under_the_launcher",
    "test_mail.py::test_the_time_of_a_message_begins_with_waiting_for_it",
    "test_bench_collective.py::test_a_small_bench_against_mpi",
    "test_bench_collective.py::test_ranks_that_hang_are_reported",
    "test_verdict.py::test_a_rank_that_never_comes",
    "test_relay.py::test_one_member_of_a_subgroup_is_named",
    "test_relay.py::test_a_rank_that_does_not_come_is_named_with_what_it_does",
    "test_security.py::test_a_rank_without_the_jobs_token_is_not_authorised[wrong-local]",
    "test_security.py::test_a_rank_without_the_jobs_token_is_not_authorised[only-here]",
    "test_security.py::test_tls_that_does_not_fit[plain-coordinator]",
    "test_security.py::test_tls_that_does_not_fit[plain-member]",
    "test_security.py::test_tls_that_does_not_fit[wrong-host]",
    "test_killed.py::test_a_rank_that_stops_in_the_middle_is_named_at_the_deadline[gather]",
    "test_examples.py::test_demo_with_a_rank_that_is_killed[0]",
    "test_examples.py::test_demo_with_a_rank_that_raises[0]",
    "test_rollcall_places.py::test_something_else_has_the_port[tcpstore-3]",
    "test_rollcall_places.py::test_something_else_has_the_port[silent-3]",
    "test_bootstrap.py::test_under_torchrun[static]",
    "test_lifecycle.py::test_an_exception_in_a_child_of_multiprocessing_reaches_peers[torch]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long ones to the soak, before pytest looks at the marks."""
    for item in items:
        if any(name in item.nodeid for name in LONG):
            item.add_marker("soak")


def pytest_configure() -> None:
    """See orphans of killed processes too, and let every process that a test starts hear Ctrl-C and SIGHUP.

    What a shell runs in the background ignores the one, what `nohup` runs the other; and so would all that it starts.
    """
    leaks.adopt_orphans()
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, usual)


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
