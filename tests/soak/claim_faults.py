"""Faults in the identities and arguments of ranks. One machine is enough."""

from __future__ import annotations

from soak.laboratory import Change, Fault, Fix
from soak.remedies import code, exported, unset
from soak.scripts import FORM, forms

__all__ = ["FAULTS"]

BY_ENVIRONMENT = "variables()\nsay(outcome=attempt(formed_by_environment))\nend()\n"

# torch has one backend for CPUs in its wheels; a second one is registered as its users register theirs.
SECOND = """
if not ours:
    def other(store, rank, size, timeout):
        return dist.ProcessGroupGloo(dist.PrefixStore("other", store), rank, size, timeout)
    dist.Backend.register_backend("other", other, devices=["cpu"])
"""

FAULTS = [
    Fault(
        "two processes claim rank 1",
        "before",
        "duplicate-rank",
        (1,),
        count=3,
        body=forms(rank="min(rank, 1)"),
        fix=code(r"^give each process its own rank \(RANK, rank="),
    ),
    Fault(
        "two processes claim rank 0",
        "before",
        "duplicate-rank",
        (0,),
        count=3,
        body=forms(rank="rank % 2"),
        fix=code(r"^give each process its own rank \(RANK, rank="),
    ),
    Fault(
        "world sizes differ, 2 and 3",
        "before",
        "world-size-mismatch",
        (1,),
        body=forms(world_size="2 + rank"),
        fix=code("^start every rank with the same WORLD_SIZE or world_size="),
    ),
    Fault(
        "a rank beyond the world size",
        "before",
        "rank-out-of-range",
        (5,),
        body=forms(rank="5 * rank"),
        fix=code("give a rank between 0 and 1,"),
    ),
    Fault(
        "backends differ",
        "before",
        "backend-mismatch",
        (1,),
        body=SECOND + forms(backend="('allhands' if ours else 'other') if rank else 'gloo'"),
        fix=code("^pass the same backend= on every rank"),
    ),
    Fault(
        "a backend that is misspelt on one rank",
        "before",
        "backend-unknown",
        (1,),
        body=forms(backend="'glooo' if rank else 'gloo'"),
        fix=code(r"^did you mean 'gloo'\? Pass it as backend="),
    ),
    Fault(
        "nccl on a build of torch without it",
        "before",
        "nccl-missing",
        (1,),
        body=forms(backend="'nccl' if rank else 'gloo'"),
        fix=code("use backend='gloo'$"),
    ),
    Fault(
        "mpi where no MPI can be loaded",
        "before",
        "mpi-missing",
        (1,),
        body="if faulty and rank:\n    sys.modules['mpi4py'] = None\n"
        "say(outcome=attempt(form, backend='mpi'))\nend()\n",
        fix=code(r"`pip install 'allhands\[mpi\]'` \(mpi4py"),
    ),
    Fault(
        "a GPU on a machine without one",
        "before",
        "gpu-missing",
        (1,),
        body=forms(device_id="torch.device('cuda:0') if rank else None"),
        fix=code("leave device_id= out and use backend='gloo'$"),
    ),
    Fault(
        "torch 2.0 on one rank (faked at the handshake)",
        "before",
        "version-mismatch",
        (1,),
        body="if rank == 1:\n    torch.__version__ = '2.0.0'\n" + FORM,
        fix=exported("(?P<name>ALLHANDS_MIXED_VERSIONS)=1 allows torch to differ", "1"),
    ),
    Fault(
        "another allhands on one rank (faked at the handshake)",
        "before",
        "version-mismatch",
        (1,),
        note="torch compares no versions",
        body="if ours and faulty and rank == 1:\n    import allhands.groups.lifecycle as lifecycle\n"
        "    real = lifecycle.Claim\n"
        "    lifecycle.Claim = lambda **kw: real(**{**kw, 'allhands': '0.0.1'})\n" + FORM,
        fix=code("^install the same torch and allhands everywhere"),
    ),
    Fault(
        "no rank has WORLD_SIZE",
        "before",
        "incomplete-environment",
        (),
        env={rank: {"WITHOUT": "WORLD_SIZE"} for rank in (0, 1)},
        body=BY_ENVIRONMENT,
        fix=exported("^set (?P<name>WORLD_SIZE) as well", "2"),
        says="WORLD_SIZE is missing",
    ),
    Fault(
        "no rank has MASTER_PORT",
        "before",
        "incomplete-environment",
        (),
        env={rank: {"WITHOUT": "MASTER_PORT"} for rank in (0, 1)},
        body=BY_ENVIRONMENT,
        fix=exported("^set (?P<name>MASTER_PORT) to a free port of rank 0's host"),
        says="MASTER_PORT is missing",
    ),
    Fault(
        "RANK contradicts Open MPI's",
        "before",
        "launcher-mismatch",
        (),
        env={rank: {"OMPI_COMM_WORLD_RANK": str(1 - rank), "OMPI_COMM_WORLD_SIZE": "2"} for rank in (0, 1)},
        body=BY_ENVIRONMENT,
        fix=Fix(
            "^if openmpi started this process: unset (?P<names>RANK WORLD_SIZE)",
            lambda _, match: Change({"WITHOUT": match["names"]}),
        ),
        says="OMPI_COMM_WORLD_RANK=",
    ),
    Fault(
        "an ALLHANDS_ATTEMPT that is no number",
        "before",
        "invalid-argument",
        (),
        env={1: {"ALLHANDS_ATTEMPT": "two"}},
        special={0: ("missing-ranks", (1,))},
        note="TORCHELASTIC_RESTART_COUNT=two; torch counts attempts only for torchrun",
        body="if not ours and rank:\n    os.environ['TORCHELASTIC_RESTART_COUNT'] = 'two'\n" + FORM,
        fix=unset("^unset (?P<names>ALLHANDS_ATTEMPT),"),
        says="ALLHANDS_ATTEMPT='two'",
    ),
    Fault(
        "job names differ",
        "before",
        "job-mismatch",
        (1,),
        note="torch has no job names: it accepts any process with the address",
        env={0: {"ALLHANDS_JOB": "day"}, 1: {"ALLHANDS_JOB": "night"}},
        body=FORM,
        fix=exported(r"every rank of a job the same name \((?P<name>ALLHANDS_JOB)", "day"),
    ),
    Fault(
        "a rank has another token",
        "before",
        "not-authorised",
        (1,),
        certain=False,
        note="torch has no tokens: it accepts any process with the address",
        env={0: {"ALLHANDS_TOKEN": "right"}, 1: {"ALLHANDS_TOKEN": "wrong"}},
        body=FORM,
        fix=exported("^give every rank of the job the same (?P<name>ALLHANDS_TOKEN) ", "right"),
    ),
    Fault(
        "a rank has no token",
        "before",
        "not-authorised",
        (1,),
        certain=False,
        note="torch has no tokens: it accepts any process with the address",
        env={0: {"ALLHANDS_TOKEN": "right"}},
        body=FORM,
        fix=exported("^give every rank of the job the same (?P<name>ALLHANDS_TOKEN) ", "right"),
    ),
]
