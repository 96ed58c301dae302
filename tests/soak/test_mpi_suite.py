"""The collective tests of shared memory and of the relay, all on MPI: both families, with mpirun and without."""

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

WAYS = ["openmpi", "mpich", "mpirun.openmpi", "mpirun.mpich"]


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every rank use MPI of one family: started by its mpirun, or as the tests start theirs."""
    launcher, _, family = request.param.rpartition("mpirun.")
    del launcher
    mpirun.require(family)
    start = harness.start
    chosen = {"ALLHANDS_ENGINE": "mpi", "MPI4PY_MPIABI": family}

    def on_mpi(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        given = {**chosen, **(env or {})}
        if not request.param.startswith("mpirun."):
            return start(source, ranks, given, **kw)
        return mpirun.start(family, source, ranks, given, timeout=max(90.0, kw.pop("timeout", 0.0)), **kw)

    monkeypatch.setattr(harness, "start", on_mpi)
    monkeypatch.setattr(test_shm, "ENGINE", "MpiGroup")
