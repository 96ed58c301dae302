"""The tests of shared memory and of the relay, on rails: in two and in three network namespaces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hosts.conftest import Making
from hosts.test_hosts import PORT
from ranks import harness, test_relay, test_shm
from ranks.crew import Crew, programs
from ranks.program import Op
from ranks.test_relay import (
    test_a_call_that_one_rank_cannot_make_is_told_to_all,
    test_a_mismatch_says_what_each_rank_called_and_where,
    test_a_rank_that_falls_ends_the_call_for_the_others,
    test_calls_under_way_keep_their_order_and_fail_where_waited,
    test_ctrl_c_ends_a_wait_and_tells_the_others,
    test_one_member_of_a_subgroup_is_named,
    test_parts_of_different_sizes,
    test_results_are_the_same_bits_on_every_rank,
    test_sizes_that_do_not_fit_each_other,
)
from ranks.test_shm import (
    test_a_forked_child_and_a_root_that_does_not_exist_are_refused,
    test_a_mismatch_raises_on_every_rank,
    test_a_rank_that_does_not_come_is_named_with_what_it_does,
    test_every_reduction_on_every_type,
    test_groups_overlap_and_threads_share_them,
    test_random_operations_agree_with_a_model,
    test_sixteen_bit_sums_round_once,
    test_strides_scalars_and_large_tensors,
)

# Tests of other modules: pytest finds them here too, and the fixture below moves them to several hosts.
__all__ = [
    "test_a_call_that_one_rank_cannot_make_is_told_to_all",
    "test_a_forked_child_and_a_root_that_does_not_exist_are_refused",
    "test_a_mismatch_raises_on_every_rank",
    "test_a_mismatch_says_what_each_rank_called_and_where",
    "test_a_rank_that_does_not_come_is_named_with_what_it_does",
    "test_a_rank_that_falls_ends_the_call_for_the_others",
    "test_calls_under_way_keep_their_order_and_fail_where_waited",
    "test_ctrl_c_ends_a_wait_and_tells_the_others",
    "test_every_reduction_on_every_type",
    "test_groups_overlap_and_threads_share_them",
    "test_one_member_of_a_subgroup_is_named",
    "test_parts_of_different_sizes",
    "test_random_operations_agree_with_a_model",
    "test_results_are_the_same_bits_on_every_rank",
    "test_sixteen_bit_sums_round_once",
    "test_sizes_that_do_not_fit_each_other",
    "test_strides_scalars_and_large_tensors",
]

pytestmark = [pytest.mark.soak, pytest.mark.hosts, pytest.mark.usefixtures("nursery")]

# How the ranks lie; tests that count their ranks by hand have three.
LAYOUTS = {
    "2x2": [0, 0, 1, 1],
    "1+2+2": [0, 1, 1, 2, 2],
    "2+1": [0, 0, 1],
    "mixed": [0, 1, 0],
}
COUNTED = {
    "test_sizes_that_do_not_fit_each_other",
    "test_a_mismatch_says_what_each_rank_called_and_where",
    "test_random_programs_agree_with_numpy",
    "test_sixteen_bit_sums_round_once",
    "test_one_member_of_a_subgroup_is_named",
    "test_groups_overlap_and_threads_share_them",
}

ENTER = "from hosts.enter_host import enter; enter()\n"


@pytest.fixture(autouse=True, params=LAYOUTS)
def on_hosts(request: pytest.FixtureRequest, network: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of every test lie on hosts."""
    layout = LAYOUTS[request.param]
    counted = request.node.originalname in COUNTED
    if counted != (len(layout) == 3):
        pytest.skip("it counts its ranks by hand" if counted else "on more ranks")
    if request.node.originalname == "test_sixteen_bit_sums_round_once" and request.param == "mixed":
        pytest.skip("it adds in the order of ranks, and here the order of hosts is another")
    made = network(max(layout) + 1)
    start = harness.start
    address = {"MASTER_ADDR": made.hosts[0].ipv4, "MASTER_PORT": str(PORT)}

    def on_rails(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        del ranks
        return start(ENTER + source, len(layout), {**address, **(env or {})}, each=made.each(layout), **kw)

    monkeypatch.setattr(harness, "start", on_rails)
    monkeypatch.setattr(test_shm, "ENGINE", "WideGroup")
    monkeypatch.setattr(test_relay, "GLOO", {})


def test_random_programs_agree_with_numpy() -> None:
    """Random programs, with subgroups inside a host and across, give what numpy does."""
    with Crew(timeout=400) as crew:

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
            crew.run(program)

        run()
    assert crew.operations > 300
