"""What MPI's engine does before it communicates: which library, who answers MPICH, which group is meant."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from allhands import _core
from allhands.engines.dtypes import DTYPES, reduce_rows
from allhands.engines.mpi import library, pmi
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
def test_the_mpirun_that_started_a_process(env: dict[str, str], family: str) -> None:
    """Its variables say which family it is of."""
    assert library.launched(env) == family


class Talk:
    """The MPI library's end of a manager."""

    def __init__(self, manager: pmi.Manager) -> None:
        self._socket = socket.socket(fileno=os.dup(int(manager.environment["PMI_FD"])))

    def ask(self, line: str) -> str:
        """Say a line and return the answer."""
        self._socket.sendall(f"{line}\n".encode())
        return self._socket.recv(4096).decode().strip()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def test_mpich_is_answered_from_the_store() -> None:
    """What one rank puts the other gets, values with signs of equality too; a barrier waits for both."""
    store: Any = HashStore()
    managers = [pmi.Manager(store, rank, 2) for rank in range(2)]
    first, second = (Talk(manager) for manager in managers)
    assert managers[1].environment["PMI_RANK"] == "1"
    assert first.ask("cmd=init pmi_version=1 pmi_subversion=1").endswith("rc=0")
    assert "vallen_max=1024" in first.ask("cmd=get_maxes")
    assert first.ask("cmd=get kvsname=allhands key=P0").startswith("cmd=get_result rc=-1")
    assert "rc=0" in first.ask("cmd=put kvsname=allhands key=P0 value=a=b#c")
    passed: list[str] = []
    waiting = threading.Thread(target=lambda: passed.append(first.ask("cmd=barrier_in")))
    waiting.start()
    waiting.join(0.2)
    assert passed == []
    assert second.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
    waiting.join(10)
    assert passed == ["cmd=barrier_out rc=0"]
    assert second.ask("cmd=get kvsname=allhands key=P0").endswith("value=a=b#c")
    assert "rc=-1" in second.ask("cmd=spawn nprocs=1")
    first.close()
    second.close()


def test_which_engine_a_backend_is() -> None:
    """The name mpi is torch's allhands with our engine; other names stay as they are; mixtures are refused."""
    assert engine_choice.split("MPI") == ("allhands", "mpi")
    assert engine_choice.split("gloo") == ("gloo", "")
    assert engine_choice.split(None) == (None, "")
    for mixture in ("cpu:mpi", "cpu:mpi,cuda:nccl", "cuda:nccl,cpu:mpi"):
        with pytest.raises(AllhandsError) as caught:
            engine_choice.split(mixture)
        assert caught.value.slug == "invalid-argument"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint64, torch.bool], ids=str)
def test_reducing_gathered_memory(dtype: torch.dtype) -> None:
    """The core reduces rows of memory as `reduce_rows` does, also into one of them; what is not defined raises."""
    rows = [((torch.arange(3001) + each) % 5).to(dtype) for each in range(3)]
    want = reduce_rows(rows, 1)
    addresses = tuple(row.data_ptr() for row in rows)
    _core.reduce(DTYPES[dtype], 1, addresses[2], addresses, rows[0].nbytes)
    assert torch.equal(rows[2], want)
    with pytest.raises(ValueError, match="reduce"):
        _core.reduce(DTYPES[dtype], 99, addresses[2], addresses, rows[0].nbytes)
    if dtype.itemsize > 1:
        with pytest.raises(ValueError, match="reduce"):
            _core.reduce(DTYPES[dtype], 1, addresses[2], addresses, rows[0].nbytes - 1)
