"""The MPI recipe on one host, with real mpiruns: ranks read their identity from MPI's variables, and train."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hosts.machine import Machine, finish, typed
from recipes import CLUSTERS, blocks

# Open MPI needs these to run as root and with fewer cores than ranks.
MEANT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpi(kind: str, folder: Path) -> str:
    """Return a shell's beginning that lets `mpirun` and `mpiexec` mean those of ``kind``; skip where there is none."""
    program = shutil.which(f"mpirun.{kind}")
    if program is None:
        pytest.skip(f"mpirun.{kind} is not installed (apt install {'openmpi-bin' if kind == 'openmpi' else kind})")
    # Debian can install both; the plain names then refer to the user's choice.
    for name in ("mpirun", "mpiexec"):
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / name).chmod(0o755)
    return f"PATH={folder}:$PATH\n"


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_one_host(tmp_path: Path, kind: str) -> None:
    """The recipe's line starts ranks that form a group with a bare init_process_group(), and train."""
    beginning = mpi(kind, tmp_path)
    (command,) = (each for each in blocks("mpi") if each.startswith("mpirun -n"))
    # Printed before training: the variables of MPI that it read.
    asked = command.replace("python train.py", "allhands whoami")
    with typed(Machine(None, kind, tmp_path, MEANT).type(beginning + asked + command, cwd=CLUSTERS)) as begun:
        (said,) = finish(begun)
    name = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}[kind]
    assert {*re.findall(rf"{name}=\d", said)} == {f"{name}=0", f"{name}=1"}
    assert "trained: 2 ranks on 1 hosts" in said
