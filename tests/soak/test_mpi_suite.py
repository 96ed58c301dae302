"""The collective tests of shared memory and of Gloo, all on MPI, under the mpirun of Open MPI and of MPICH."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import harness, mpirun, test_shm
from ranks.test_relay import (
    test_a_call_that_one_rank_cannot_make_is_told_to_all,
    test_a_rank_that_falls_ends_the_call_for_the_others,
    test_calls_under_way_keep_their_order_and_fail_where_waited,
    test_ctrl_c_ends_a_wait_and_tells_the_others,
    test_one_member_of_a_subgroup_is_named,
    test_parts_of_different_sizes,
    test_results_are_the_same_bits_on_every_rank,
    test_sizes_that_do_not_fit_each_other,
    test_what_torch_builds_on_a_group,
)
from ranks.test_shm import (
    test_a_forked_child_and_a_root_that_does_not_exist_are_refused,
    test_a_mismatch_raises_on_every_rank,
    test_a_rank_that_does_not_come_is_named_with_what_it_does,
    test_a_rank_that_falls_in_a_collective_ends_it_for_the_others,
    test_every_reduction_on_every_type,
    test_groups_overlap_and_threads_share_them,
    test_random_operations_agree_with_a_model,
    test_sixteen_bit_sums_round_once,
    test_strides_scalars_and_large_tensors,
    test_torch_trains_the_same_on_it_as_on_gloo,
)

# Tests of other modules: pytest finds them here too, and the fixture below turns them to MPI.
__all__ = [
    "test_a_call_that_one_rank_cannot_make_is_told_to_all",
    "test_a_forked_child_and_a_root_that_does_not_exist_are_refused",
    "test_a_mismatch_raises_on_every_rank",
    "test_a_rank_that_does_not_come_is_named_with_what_it_does",
    "test_a_rank_that_falls_ends_the_call_for_the_others",
    "test_a_rank_that_falls_in_a_collective_ends_it_for_the_others",
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
    "test_torch_trains_the_same_on_it_as_on_gloo",
    "test_what_torch_builds_on_a_group",
]

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("nursery")]


@pytest.fixture(autouse=True, params=mpirun.FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every rank by the mpirun of one family, with the MPI engine."""
    mpirun.require(request.param)

    def start(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        given = {"ALLHANDS_ENGINE": "mpi", **(env or {})}
        timeout = max(90.0, kw.pop("timeout", 0.0))
        return mpirun.start(request.param, source, ranks, given, timeout=timeout, **kw)

    monkeypatch.setattr(harness, "start", start)
    monkeypatch.setattr(test_shm, "ENGINE", "WideGroup")
