"""`allhands engines` is right, agrees with ranks and the doctor, and does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import allhands
from allhands import cli
from allhands.diagnosis import CATALOGUE
from allhands.diagnosis.explain import render as page
from allhands.doctor import engines
from allhands.doctor.engines import Installed, Offer, Probe, installed, offers, probe, render, report
from allhands.doctor.request import Request
from allhands.engines.mpi import library
from allhands.engines.needs import needs
from allhands.engines.shm.fd_passing import no_room

NAMES = ["shm", "gloo", "hierarchical", "nccl", "cuda_ipc", "mpi"]
CPU = Installed(torch="2.13.0+cpu", mpi="/usr/bin/mpirun", mpi4py="4.1.2")
CUDA = Installed(torch="2.13.0", cuda="13.0", nccl="2.28", driver="13.1", mpi="/usr/bin/mpirun", mpi4py="4.1.2")
ALL = Probe(nccl=True, gpus=2, family="openmpi", mpi="Open MPI v4.1.4")

# Of the packages that are installed here, what allhands' commands need.
NEEDED = ("click", "msgspec", "psutil")


def offer(name: str, found: Installed, probed: Probe) -> Offer:
    """Return the offer of one engine."""
    return next(each for each in offers(found, probed) if each.name == name)


def bare(folder: Path, *packages: str, **environment: str) -> dict[str, Any]:
    """Run the command in an interpreter that has the standard library, allhands and ``packages``, and nothing else."""
    for name in packages:
        for top in {Path(str(file)).parts[0] for file in metadata.files(name) or []} - {"..", "__pycache__"}:
            place = Path(str(metadata.distribution(name).locate_file(top)))
            if not (folder / top).exists():
                (folder / top).symlink_to(place)
    paths = [str(folder), str(Path(allhands.__file__).parents[1])]
    done = subprocess.run(
        # -S leaves out what site-packages, of the environment and of the system, would bring.
        [sys.executable, "-S", "-W", "error", "-m", "allhands", "engines", "--json"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert [each["name"] for each in answer["engines"]] == NAMES
    return {**answer, **{each["name"]: each for each in answer["engines"]}}


def test_probe_agrees_with_torch() -> None:
    """The values read from torch's files and the driver are those that torch itself reports."""
    probed = probe(installed())
    assert probed.gloo == dist.is_gloo_available()
    assert probed.nccl == dist.is_nccl_available()
    assert probed.gpus == torch.cuda.device_count()
    assert probed.no_memory == ""


def test_all_available() -> None:
    """If nothing is missing, every engine is offered with its version."""
    found = offers(CUDA, ALL)
    assert [each.name for each in found] == NAMES
    assert all(each.available and each.version and not each.slug for each in found)
    assert "Open MPI v4.1.4 with mpi4py 4.1.2" in found[-1].version


@pytest.mark.parametrize(
    ("name", "found", "probed", "slug"),
    [
        ("shm", CPU, Probe(no_memory="the kernel refused the pages: No space left on device"), "shm-too-small"),
        ("shm", Installed(torch="2.13.0", core=False), Probe(), "engine-failed"),
        ("hierarchical", Installed(torch="2.13.0", core=False), Probe(), "engine-failed"),
        ("gloo", CPU, Probe(gloo=False), "backend-unknown"),
        ("nccl", CPU, Probe(), "nccl-missing"),
        ("nccl", CUDA, Probe(nccl=True), "gpu-missing"),
        ("nccl", Installed(torch="2.13.0", cuda="13.0", driver="12.8"), Probe(nccl=True, gpus=1), "driver-mismatch"),
        ("cuda_ipc", CPU, Probe(), "gpu-missing"),
        ("cuda_ipc", Installed(torch="2.13.0+cpu", driver="13.0"), Probe(gpus=1), "driver-mismatch"),
        ("mpi", CPU, Probe(no_mpi="the module mpi4py is not installed in /opt"), "mpi-missing"),
        ("mpi", Installed(torch="2.13.0"), Probe(family="openmpi", mpi="Open MPI v4.1.4"), "mpi-missing"),
        *((name, Installed(), Probe(), "version-mismatch") for name in NAMES),
    ],
)
def test_what_is_missing(name: str, found: Installed, probed: Probe, slug: str) -> None:
    """Each thing that can be missing has the slug of its diagnosis, a reason and a fix."""
    answer = offer(name, found, probed)
    assert (answer.available, answer.slug) == (False, slug)
    assert slug in CATALOGUE
    assert answer.what
    assert answer.why
    assert answer.fix


def test_a_launched_process_needs_no_mpirun() -> None:
    """In a process that an mpirun started there is one, wherever it is."""
    assert offer(
        "mpi", Installed(torch="2.13.0"), Probe(family="openmpi", mpi="Open MPI", launched="openmpi")
    ).available


# The texts are those of ranks ---------------------------------------------------------------------------------


def test_nccl_missing_as_ranks_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without NCCL gets what a rank that asks for it gets."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    rank, answer = needs("nccl", 2, 0), offer("nccl", Installed(torch=str(torch.__version__)), Probe())
    assert rank is not None
    assert (answer.slug, answer.what, answer.why, answer.fix) == (rank.slug, rank.what, rank.why, rank.fix)
    assert answer.fix in page("nccl-missing")


@pytest.mark.parametrize("visible", ["", "7", None])
def test_gpu_missing_as_ranks_report_it(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a GPU gets what a rank gets; the reason is what was seen without torch."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    rank, answer = needs("nccl", 2, 0), offer("nccl", CUDA, Probe(nccl=True, visible=visible))
    assert rank is not None
    assert (answer.slug, answer.what, answer.fix) == (rank.slug, rank.what, rank.fix)
    assert answer.why == (rank.why if visible is not None else "the driver counts no GPU")
    assert answer.fix in page("gpu-missing")


def test_mpi_missing_as_ranks_report_it() -> None:
    """Where there is no MPI, reason and fix are those that a rank reports."""
    rank = library.missing("there is none", library.INSTALL, who="rank 0").diagnosis
    answer = offer("mpi", CPU, Probe(no_mpi="there is none"))
    assert (answer.slug, answer.what, answer.why, answer.fix) == (rank.slug, rank.what, rank.why, rank.fix)
    assert answer.fix in page("mpi-missing")


def test_no_room_as_ranks_report_it() -> None:
    """Shared memory that the kernel refuses has the fix that a rank prints."""
    assert offer("shm", CPU, Probe(no_memory="refused")).fix == no_room(1, "", "").diagnosis.fix


def test_doctor_reports_the_same() -> None:
    """The stack section names the engines that the command offers, and the reasons for the others."""
    found = {each["name"]: each for each in report()["engines"]}
    answer = next(each for each in engines.check(Request({})) if each.check == "engines")
    assert answer.details["engines"] == [name for name, each in found.items() if each["available"]]
    assert answer.details["missing"] == {name: each["why"] for name, each in found.items() if not each["available"]}


# Really absent ------------------------------------------------------------------------------------------------


def test_without_mpi4py(tmp_path: Path) -> None:
    """A Python without mpi4py offers the rest, and says what to install."""
    answer = bare(tmp_path, *NEEDED, "torch")
    assert answer["shm"]["available"]
    assert answer["gloo"]["available"]
    assert not answer["mpi"]["available"]
    assert answer["mpi"]["why"].startswith("the module mpi4py is not installed in ")
    assert answer["mpi"]["fix"] == library.INSTALL
    assert answer["torch"] == torch.__version__


def test_without_torch(tmp_path: Path) -> None:
    """A Python without torch is told so for every engine; nothing is raised."""
    answer = bare(tmp_path, *NEEDED)
    assert answer["torch"] == ""
    assert {each["slug"] for each in answer["engines"]} == {"version-mismatch"}


@pytest.mark.skipif(not installed().mpi4py, reason="mpi4py is not installed")
def test_without_an_mpi_library(tmp_path: Path) -> None:
    """With mpi4py and no library of an MPI, it is the library that is missed."""
    answer = bare(tmp_path, *NEEDED, "torch", "mpi4py", MPI4PY_MPIABI="nobodys")
    assert answer["mpi"]["slug"] == "mpi-missing"
    assert answer["mpi"]["why"].startswith("mpi4py is installed, but finds no MPI library")


def test_without_room() -> None:
    """Where the kernel gives no pages, shared memory is not offered, with the kernel's reason."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from allhands.doctor.engines import installed, probe\n"
        "print(probe(installed()).no_memory)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "the kernel refused the pages: File too large\n", done.stderr


# The command --------------------------------------------------------------------------------------------------


def test_json_fields_are_stable() -> None:
    """Programs find the same names whatever is missing, and the exit status is 0."""
    result = CliRunner().invoke(cli.main, ["engines", "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(answer) == {"schema", "allhands", "torch", "cuda", "gpus", "mpi", "engines"}
    assert answer["schema"] == 1
    assert set(answer["mpi"]) == {"family", "library", "mpi4py", "mpirun"}
    names = {"name", "moves", "available", "version", "slug", "what", "why", "fix", "commands"}
    assert [set(each) for each in answer["engines"]] == [names] * len(NAMES)
    assert [each["name"] for each in answer["engines"]] == NAMES


def test_render() -> None:
    """The text has each engine once, and for one that cannot run its reason, its fix and its page."""
    data = report()
    text = render({**data, "engines": [vars_of(each) for each in offers(CPU, Probe(no_mpi="there is none"))]})
    heads = [line.split()[:2] for line in text.splitlines() if not line.startswith(" ")]
    assert heads == [[name, "no" if name in {"nccl", "cuda_ipc", "mpi"} else "yes"] for name in NAMES]
    assert "why   there is none" in text
    assert "more  allhands explain mpi-missing" in text
    assert max(map(len, text.splitlines())) <= 100
    assert CliRunner().invoke(cli.main, ["engines"]).exit_code == 0


def vars_of(answer: Offer) -> dict[str, Any]:
    """Return an offer as the JSON has it."""
    return {name: getattr(answer, name) for name in answer.__struct_fields__}
