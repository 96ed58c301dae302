"""The collective tests of shared memory and of Gloo, all on MPI, under the mpirun of Open MPI and of MPICH."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.engines import OnEngine
from conformance.test_failures import (
    test_a_forked_child_and_an_invalid_root_are_refused,
    test_a_killed_rank_ends_the_call_of_the_others,
    test_a_mismatch_raises_on_every_rank,
    test_a_missing_rank_is_named_at_the_deadline,
)
from conformance.test_operations import (
    test_ddp_trains_the_same_as_on_gloo,
    test_every_reduction_on_every_type,
    test_overlapping_groups_used_by_threads,
    test_parts_of_different_sizes,
    test_random_operations_agree_with_a_model,
    test_results_are_the_same_bits_on_every_rank,
    test_sixteen_bit_sums_round_once,
    test_strides_scalars_and_large_tensors,
)
from ranks import harness, mpirun
from ranks.test_gloo_engine import (
    test_a_call_that_one_rank_cannot_make_is_an_error_on_all,
    test_ctrl_c_ends_a_wait_and_is_reported_to_the_others,
    test_one_member_of_a_subgroup_is_named,
    test_pending_calls_keep_their_order_and_fail_in_wait,
    test_sizes_that_do_not_fit_each_other,
    test_what_torch_builds_on_a_group,
)

# Tests of other modules: pytest finds them here too, and the fixture below turns them to MPI.
__all__ = [
    "test_a_call_that_one_rank_cannot_make_is_an_error_on_all",
    "test_a_forked_child_and_an_invalid_root_are_refused",
    "test_a_killed_rank_ends_the_call_of_the_others",
    "test_a_mismatch_raises_on_every_rank",
    "test_a_missing_rank_is_named_at_the_deadline",
    "test_ctrl_c_ends_a_wait_and_is_reported_to_the_others",
    "test_ddp_trains_the_same_as_on_gloo",
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
    "test_what_torch_builds_on_a_group",
]

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]


@pytest.fixture(params=mpirun.FAMILIES)
def engine(request: pytest.FixtureRequest) -> OnEngine:
    """MPI of one family, with ranks that its mpirun started."""
    mpirun.require(request.param)

    def on_mpi(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        return mpirun.start(request.param, source, ranks, env, timeout=max(90.0, kw.pop("timeout", 0.0)), **kw)

    return OnEngine("mpi", {"ALLHANDS_ENGINE": "mpi"}, begin=on_mpi)


@pytest.fixture
def any_engine(engine: OnEngine) -> OnEngine:
    """The same."""
    return engine
