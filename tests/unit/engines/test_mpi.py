"""The MPI engine before it communicates: which launcher started a process, which backends select it."""

from __future__ import annotations

import pytest

from allhands.engines.mpi import library
from allhands.errors import AllhandsError
from allhands.groups import engine_choice


@pytest.mark.parametrize(
    ("env", "family"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "openmpi"),
        ({"PMIX_NAMESPACE": "x"}, "openmpi"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpich"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "0"}, "openmpi"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_the_launcher_of_a_process(env: dict[str, str], family: str) -> None:
    """The launcher's variables select the ABI of mpi4py."""
    assert library.launched(env) == family


def test_ranks_of_different_worlds_are_refused() -> None:
    """Two ranks with one number in MPI's world, or two libraries, raise mpi-missing, which names the second rank."""
    twice = [(0, 1, "Open MPI v4.1.4", "node-a, pid 1"), (0, 1, "Open MPI v4.1.4", "node-a, pid 2")]
    with pytest.raises(AllhandsError, match="ranks 4 and 7 are both rank 0 of an MPI world of 1") as caught:
        library._check_world(twice, [4, 7])
    assert (caught.value.slug, caught.value.diagnosis.ranks) == ("mpi-missing", (4, 7))
    assert "rank 7 (node-a, pid 2)" in caught.value.diagnosis.who
    mixed = [(0, 2, "Open MPI v4.1.4", "node-a, pid 1"), (1, 2, "MPICH Version: 4.0.2", "node-a, pid 2")]
    with pytest.raises(AllhandsError, match="rank 4 uses Open MPI v4"):
        library._check_world(mixed, [4, 7])
    library._check_world([twice[0], (1, 2, "Open MPI v4.1.4", "node-a, pid 2")], [4, 7])


def test_which_engine_a_backend_selects() -> None:
    """The name mpi is torch's allhands with the MPI engine; other names stay as they are; mixtures are refused."""
    assert engine_choice.split("MPI") == ("allhands", "mpi")
    assert engine_choice.split("gloo") == ("gloo", "")
    assert engine_choice.split(None) == (None, "")
    for mixture in ("cpu:mpi", "cpu:mpi,cuda:nccl", "cuda:nccl,cpu:mpi"):
        with pytest.raises(AllhandsError) as caught:
            engine_choice.split(mixture)
        assert caught.value.slug == "invalid-argument"
