"""The tests of shared memory and of Gloo on the hierarchical engine, in two and three network namespaces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from conformance.engines import OnEngine
from conformance.test_failures import (
    test_a_forked_child_and_an_invalid_root_are_refused,
    test_a_killed_rank_ends_the_call_of_the_others,
    test_a_mismatch_raises_on_every_rank,
    test_a_missing_rank_is_named_at_the_deadline,
)
from conformance.test_operations import (
    test_every_reduction_on_every_type,
    test_overlapping_groups_used_by_threads,
    test_parts_of_different_sizes,
    test_random_operations_agree_with_a_model,
    test_results_are_the_same_bits_on_every_rank,
    test_sixteen_bit_sums_round_once,
    test_strides_scalars_and_large_tensors,
)
from hosts.conftest import Making
from hosts.test_hosts import PORT
from ranks import harness
from ranks.program import Op
from ranks.random_programs import ProgramRanks, programs
from ranks.test_gloo_engine import (
    test_a_call_that_one_rank_cannot_make_is_an_error_on_all,
    test_a_mismatch_states_the_call_and_line_of_each_rank,
    test_ctrl_c_ends_a_wait_and_is_reported_to_the_others,
    test_one_member_of_a_subgroup_is_named,
    test_pending_calls_keep_their_order_and_fail_in_wait,
    test_sizes_that_do_not_fit_each_other,
)

# Tests of other modules: pytest finds them here too, and the fixture below moves them to several hosts.
__all__ = [
    "test_a_call_that_one_rank_cannot_make_is_an_error_on_all",
    "test_a_forked_child_and_an_invalid_root_are_refused",
    "test_a_killed_rank_ends_the_call_of_the_others",
    "test_a_mismatch_raises_on_every_rank",
    "test_a_mismatch_states_the_call_and_line_of_each_rank",
    "test_a_missing_rank_is_named_at_the_deadline",
    "test_ctrl_c_ends_a_wait_and_is_reported_to_the_others",
    "test_every_reduction_on_every_type",
    "test_one_member_of_a_subgroup_is_named",
    "test_overlapping_groups_used_by_threads",
    "test_parts_of_different_sizes",
    "test_pending_calls_keep_their_order_and_fail_in_wait",
    "test_random_operations_agree_with_a_model",
    "test_results_are_the_same_bits_on_every_rank",
    "test_sixteen_bit_sums_round_once",
    "test_sizes_that_do_not_fit_each_other",
    "test_strides_scalars_and_large_tensors",
]

pytestmark = [pytest.mark.soak, pytest.mark.hosts, pytest.mark.usefixtures("fork_server")]

# The host of each rank; tests with a fixed number of ranks have three.
LAYOUTS = {
    "2x2": [0, 0, 1, 1],
    "1+2+2": [0, 1, 1, 2, 2],
    "2+1": [0, 0, 1],
    "mixed": [0, 1, 0],
}
COUNTED = {
    "test_sizes_that_do_not_fit_each_other",
    "test_a_mismatch_states_the_call_and_line_of_each_rank",
    "test_random_programs_agree_with_numpy",
    "test_sixteen_bit_sums_round_once",
    "test_one_member_of_a_subgroup_is_named",
    "test_overlapping_groups_used_by_threads",
}

ENTER = "from hosts.enter_host import enter; enter()\n"


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest, network: Making) -> OnEngine:
    """The hierarchical engine, with the ranks of a test on hosts."""
    layout = LAYOUTS[request.param]
    counted = request.node.originalname in COUNTED
    if counted != (len(layout) == 3):
        pytest.skip("it has a fixed number of ranks" if counted else "on more ranks")
    if request.node.originalname == "test_sixteen_bit_sums_round_once" and request.param == "mixed":
        pytest.skip("it adds in the order of ranks, and here the order of hosts is another")
    made = network(max(layout) + 1)
    address = {"MASTER_ADDR": made.hosts[0].ipv4, "MASTER_PORT": str(PORT)}

    start = harness.start

    def on_hosts(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        del ranks
        return start(source, len(layout), {**address, **(env or {})}, each=made.each(layout), **kw)

    return OnEngine("hierarchical", prelude=ENTER, begin=on_hosts)


@pytest.fixture
def any_engine(engine: OnEngine) -> OnEngine:
    """The same."""
    return engine


def test_random_programs_agree_with_numpy(engine: OnEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs, with subgroups inside a host and across, agree with numpy."""
    monkeypatch.setattr(harness, "start", engine.start)
    with ProgramRanks(timeout=400) as ranks:

        @settings(
            max_examples=60,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(programs(5, 30))
        def run(program: list[Op]) -> None:
            ranks.run(program)

        run()
    assert ranks.operations > 300
