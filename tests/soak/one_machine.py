"""Faults that one machine is enough for: in who the ranks are, in what they ask for, in what they do."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping

import faults.test_rollcall as rollcall
from faults.test_doctor import MEMORY, PIDS, group, of, typed
from ranks.harness import Job, running
from soak.laboratory import INTO_S, Around, Fault, Finding, Site

__all__ = ["FAULTS"]

FORM = "say(outcome=attempt(form))\nend()\n"
FORMED = "init()\ngate('formed')\n"
# The rest of a script whose fault is in its collectives: told once, and not at all where it is well.
CALL = """
if faulty:
    say(outcome={**attempt(call), "x": x.tolist()})
else:
    use()
end()
"""


def forms(**kw: str) -> str:
    """Return a script that forms a group with these arguments where it is faulty."""
    given = ", ".join(f"{name}={value}" for name, value in kw.items())
    return f"say(outcome=attempt(form, **(dict({given}) if faulty else {{}})))\nend()\n"


def calls(usual: str, odd: str, *, before: str = "") -> str:
    """Return a script whose rank 1 does something else than the others."""
    lines = f"def call():\n    if rank == 1:\n        {odd}\n    else:\n        {usual}\n"
    return FORMED + before + lines + CALL


def dies(how: str) -> str:
    """Return a script whose rank 1 says that the fault begins and then does ``how``, while others wait for it."""
    return calls("dist.all_reduce(x)", f"time.sleep(0.3); say(fault=True); {how}")


# Rank 1 waits where it can be hit, the others in a collective.
HIT = (
    FORMED
    + """
say(ready=True)
if faulty and rank == int(os.environ.get("VICTIM", "1")):
    time.sleep(60)
def call():
    dist.all_reduce(x)
"""
    + CALL
)


def send(number: signal.Signals, rank: int, key: str = "ready") -> Callable[[Job, Site], float]:
    """Return what sends a signal to a rank, a moment after all have said ``key``."""

    def during(job: Job, _: Site) -> float:
        job.wait_for(key)
        time.sleep(INTO_S)
        return job.signal(rank, number)

    return during


@contextlib.contextmanager
def victim_0(_: Site) -> Iterator[Mapping[str, str]]:
    """Let rank 0 be the one that is hit."""
    yield {"VICTIM": "0"}


def taken(name: str) -> Around:
    """Return what puts another service on the port of the job."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        with rollcall.service(name) as (port, _):
            site.port = port
            yield {"METHOD": site.method}

    return around


LEFT = """
import datetime, os, time
import torch.distributed as dist
dist.init_process_group("gloo", os.environ["WHERE"], datetime.timedelta(seconds=20), size, rank)
say(formed=True)
time.sleep(60)
"""


@contextlib.contextmanager
def another_job(site: Site) -> Iterator[Mapping[str, str]]:
    """Run a job of the same library on the port for the length of the block; ours must not notice."""
    stop = site.folder / f"stop-{site.port}"
    ours = site.library == "allhands"
    with running(rollcall.JOB if ours else LEFT, 2, {"WHERE": site.method, "STOP": str(stop)}) as first:
        first.wait_for("formed")
        time.sleep(0.1)  # kernel start times are exact to 10 ms
        yield {}
        if ours:
            stop.with_suffix(".soon").touch()
            assert all(result["unharmed"] for result in first.results())


@contextlib.contextmanager
def left_file(site: Site) -> Iterator[Mapping[str, str]]:
    """Leave the file that a job of torch used which was then killed; it is removed after the block."""
    path = site.folder / "meeting"
    with running(LEFT, 2, {"WHERE": f"file://{path}"}) as job:
        job.wait_for("formed")
        for rank in (0, 1):
            job.signal(rank, signal.SIGKILL)
        job.results()
    yield {}
    path.unlink(missing_ok=True)


def met(job: Job, site: Site) -> float:
    """Kill rank 0 when rank 1 has come to it and both wait for rank 2."""
    job.wait_for("ready")
    rollcall.connected(job.ranks[1].pid, site.port)
    time.sleep(INTO_S)
    return job.signal(0, signal.SIGKILL)


def examined(check: str, *words: str, before: tuple[str, ...] = (), **env: str) -> Finding:
    """Return one finding of the doctor, and how long it took."""
    began = time.monotonic()
    found = of(typed(*words, before=before, **env), check)
    return Finding(found["slug"], found["what"], time.monotonic() - began)


def few_processes(_: Site) -> Finding:
    """Look in a container that may have 60 processes."""
    with group(PIDS, pids_dot_max="60") as inside:
        return examined("processes", before=inside)


def little_memory(_: Site) -> Finding:
    """Look in a container that may use 400 MiB."""
    with group(MEMORY, memory_dot_limit_in_bytes=str(400 << 20)) as inside:
        return examined("memory", "-n", "2", before=inside)


def full_shm(_: Site) -> Finding:
    """Look in a container whose shared memory is full."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=1M count=60 2>&-"
    return examined("shm", before=("unshare", "-m", "sh", "-c", f'{mount}; exec "$@"', "sh"))


def stale_worker(site: Site) -> Finding:
    """Look at a port that a worker holds whose launcher is gone; it is adopted by process 1 of a namespace."""
    import json
    import subprocess
    import sys

    from faults.test_doctor import DOCTOR, STALE
    from ranks.harness import environment

    place = site.folder / "stale"
    script = (
        f"TORCHELASTIC_RUN_ID=x {sys.executable} -c '{STALE}' > $1; until [ -s $1 ]; do sleep 0.05; done; "
        'read pid port < $1; sleep 2.2; date +%s.%N; shift; "$@" "127.0.0.1:$port" --json; date +%s.%N'
    )
    line = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", str(place), *DOCTOR]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment({}))
    began, _, rest = done.stdout.partition("\n")
    text, _, over = rest.rstrip().rpartition("\n")
    found = of(json.loads(text), "leftovers")
    return Finding(found["slug"], found["what"], float(over) - float(began))


# What a DataLoader does with each batch, in a container whose shared memory is full.
SHARE = """
import ctypes, subprocess
from hosts.hostside import CLONE_NEWNS, MS_PRIVATE, MS_REC
libc = ctypes.CDLL(None)
assert libc.unshare(CLONE_NEWNS) == 0
assert libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
with open("/dev/shm/full", "wb") as full:
    full.write(bytes(60 << 20))
say(outcome=attempt(lambda: torch.zeros(25 << 20).share_memory_()))
"""

SCHEDULER = "OMPI_COMM_WORLD_RANK=str(1 - rank), OMPI_COMM_WORLD_SIZE='2'"

BEFORE = [
    Fault(
        "a rank never comes",
        "before",
        "missing-ranks",
        (2,),
        count=3,
        certain=False,
        observers=(0, 1),
        body="if not faulty or rank != 2:\n    say(outcome=attempt(form))\nend()\n",
        fix="start rank 2",
    ),
    Fault(
        "rank 0 never comes",
        "before",
        "connection-refused",
        (0,),
        certain=False,
        observers=(1,),
        body="if not faulty or rank:\n    say(outcome=attempt(form))\nend()\n",
        fix="start rank 0",
    ),
    Fault(
        "rank 0 never comes to a file",
        "before",
        "missing-ranks",
        (0,),
        certain=False,
        observers=(1,),
        body="if not faulty or rank:\n    say(outcome=attempt(form, method=f'file://{os.environ[\"FOLDER\"]}/m'"
        " + str(ours)))\nend()\n",
        fix="start rank 0",
    ),
    Fault(
        "two processes claim rank 1",
        "before",
        "duplicate-rank",
        (1,),
        count=3,
        body=forms(rank="min(rank, 1)"),
        fix="give each process a rank of its own",
    ),
    Fault(
        "two processes claim rank 0",
        "before",
        "duplicate-rank",
        (0,),
        count=3,
        body=forms(rank="rank % 2"),
        fix="give each process a rank of its own",
    ),
    Fault(
        "world sizes differ, 2 and 3",
        "before",
        "world-size-mismatch",
        (1,),
        body=forms(world_size="2 + rank"),
        fix="give all the same world size",
    ),
    Fault(
        "a rank beyond the world size",
        "before",
        "rank-out-of-range",
        (5,),
        body=forms(rank="5 * rank"),
        fix="ranks from 0 to world size - 1",
    ),
    Fault(
        "backends differ",
        "before",
        "backend-mismatch",
        (1,),
        alone="torch has one backend for CPUs only",
        body=forms(backend="'allhands' if rank else 'gloo'"),
        fix="give all the same backend",
    ),
    Fault(
        "a backend that is misspelt on one rank",
        "before",
        "backend-unknown",
        (1,),
        body=forms(backend="'glooo' if rank else 'gloo'"),
        fix="backend='gloo'",
    ),
    Fault(
        "nccl on a build of torch without it",
        "before",
        "nccl-missing",
        (1,),
        body=forms(backend="'nccl' if rank else 'gloo'"),
        fix="backend='gloo'",
    ),
    Fault(
        "torch 2.0 on one rank (faked at the handshake)",
        "before",
        "version-mismatch",
        (1,),
        body="if faulty and rank == 1:\n    torch.__version__ = '2.0.0'\n" + FORM,
        fix="install the same torch everywhere",
    ),
    Fault(
        "another allhands on one rank (faked at the handshake)",
        "before",
        "version-mismatch",
        (1,),
        alone="has no such version",
        body="if faulty and rank == 1:\n    import allhands.lifecycle as lifecycle\n    real = lifecycle.Claim\n"
        "    lifecycle.Claim = lambda **kw: real(**{**kw, 'allhands': '0.0.1'})\n" + FORM,
        fix="install the same allhands everywhere",
    ),
    Fault(
        "no rank has WORLD_SIZE",
        "before",
        "incomplete-environment",
        (),
        body="variables()\nif faulty:\n    del os.environ['WORLD_SIZE']\n"
        "say(outcome=attempt(formed_by_environment))\nend()\n",
        fix="export WORLD_SIZE",
        host="WORLD_SIZE",
    ),
    Fault(
        "no rank has MASTER_PORT",
        "before",
        "incomplete-environment",
        (),
        body="variables()\nif faulty:\n    del os.environ['MASTER_PORT']\n"
        "say(outcome=attempt(formed_by_environment))\nend()\n",
        fix="export MASTER_PORT",
        host="MASTER_PORT",
    ),
    Fault(
        "RANK contradicts Open MPI's",
        "before",
        "launcher-mismatch",
        (),
        body=f"variables()\nif faulty:\n    os.environ.update({SCHEDULER})\n"
        "say(outcome=attempt(formed_by_environment))\nend()\n",
        fix="unset the one that is wrong",
        host="RANK=",
    ),
    Fault(
        "job names differ",
        "before",
        "job-mismatch",
        (1,),
        alone="does not know jobs",
        body="if faulty:\n    os.environ['ALLHANDS_JOB'] = 'night' if rank else 'day'\n" + FORM,
        fix="give all the same ALLHANDS_JOB",
    ),
    Fault(
        "a rank has another token",
        "before",
        "not-authorised",
        (1,),
        certain=False,
        alone="does not know tokens",
        body="os.environ['ALLHANDS_TOKEN'] = 'wrong' if faulty and rank else 'right'\n" + FORM,
        fix="give all the same ALLHANDS_TOKEN",
    ),
    Fault(
        "a rank has no token",
        "before",
        "not-authorised",
        (1,),
        certain=False,
        alone="does not know tokens",
        body="if not (faulty and rank):\n    os.environ['ALLHANDS_TOKEN'] = 'right'\n" + FORM,
        fix="give all the same ALLHANDS_TOKEN",
    ),
    Fault(
        "a web server has the port",
        "before",
        "wrong-service",
        (0,),
        special={0: ("port-in-use", (0,))},
        around=taken("http"),
        body=FORM,
        fix="another port",
    ),
    Fault(
        "torch's store of another job has the port",
        "before",
        "port-in-use",
        (0,),
        around=taken("tcpstore"),
        special={1: ("coordinator-silent", (0,))},
        body=FORM,
        fix="another port",
    ),
    Fault(
        "a service that says nothing has the port",
        "before",
        "port-in-use",
        (0,),
        around=taken("silent"),
        special={1: ("coordinator-silent", (0,))},
        body=FORM,
        fix="another port",
    ),
    Fault(
        "two jobs on one port",
        "before",
        "port-in-use",
        (0,),
        special={1: ("port-in-use", (1,))},
        around=another_job,
        body=FORM,
        fix="another port",
    ),
    Fault(
        "a file that a killed job left",
        "before",
        "stale-file",
        (0,),
        around=left_file,
        body="say(outcome=attempt(form, method=f'file://{os.environ[\"FOLDER\"]}/meeting'))\nend()\n",
        fix="remove the file",
    ),
    Fault(
        "GLOO_SOCKET_IFNAME names no interface",
        "before",
        "interface-mismatch",
        (1,),
        host="nosuch0",
        body="if faulty and rank:\n    os.environ['GLOO_SOCKET_IFNAME'] = 'nosuch0'\n" + FORM,
        fix="unset GLOO_SOCKET_IFNAME",
    ),
    Fault(
        "hardly any file descriptors",
        "before",
        "fd-limit",
        (1,),
        body="import resource\nFEW = len(os.listdir('/proc/self/fd')) + 2\n"
        "if faulty and rank:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))\n" + FORM,
        fix="ulimit -n 65536",
    ),
    Fault(
        "rank 0 is killed in the roll call",
        "before",
        "peer-lost",
        (0,),
        count=3,
        observers=(1,),
        during=met,
        body="say(ready=True)\nif rank < 2 or not faulty:\n    say(outcome=attempt(form))\nend()\n",
    ),
    Fault(
        "a rank raises before init",
        "before",
        "missing-ranks",
        (1,),
        certain=False,
        observers=(0,),
        body="if faulty and rank:\n    raise ValueError('boom')\n" + FORM,
    ),
]

DURING = [
    Fault(
        "a rank raises in mid-training",
        "during",
        "peer-failed",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("os.environ['NO SUCH VARIABLE']").replace(
            "attempt(call)", "(attempt(call) if rank != 1 else call())"
        ),
        host="NO SUCH VARIABLE",
    ),
    Fault("a rank calls sys.exit(3)", "during", "peer-lost", (1,), count=3, observers=(0, 2), body=dies("sys.exit(3)")),
    Fault("a rank calls os._exit(4)", "during", "peer-lost", (1,), count=3, observers=(0, 2), body=dies("os._exit(4)")),
    Fault(
        "a rank crashes (SIGSEGV)",
        "during",
        "peer-lost",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("os.kill(os.getpid(), signal.SIGSEGV)"),
    ),
    Fault(
        "kill -9 of a rank",
        "during",
        "peer-lost",
        (1,),
        count=3,
        observers=(0, 2),
        body=HIT,
        during=send(signal.SIGKILL, 1),
    ),
    Fault(
        "kill -9 of rank 0",
        "during",
        "peer-lost",
        (0,),
        count=3,
        observers=(1, 2),
        body=HIT,
        around=victim_0,
        during=send(signal.SIGKILL, 0),
    ),
    Fault(
        "a rank is stopped (SIGSTOP)",
        "during",
        "peer-silent",
        (1,),
        count=3,
        observers=(0, 2),
        certain=False,
        body=HIT,
        during=send(signal.SIGSTOP, 1),
    ),
    Fault(
        "a rank is slower than the timeout",
        "during",
        "collective-timeout",
        (1,),
        count=3,
        observers=(0, 2),
        certain=False,
        body=calls("dist.all_reduce(x)", "time.sleep(20)"),
    ),
    Fault(
        "a rank skips a collective and makes the next",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x); dist.barrier()", "dist.barrier()"),
        fix="the same calls on every rank",
    ),
    Fault(
        "all_reduce against broadcast",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.broadcast(x, 1); dist.barrier()"),
        fix="the same call on every rank",
    ),
    Fault(
        "tensors of different size",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(torch.ones(5))"),
        fix="the same size on every rank",
    ),
    Fault(
        "tensors of different type",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(x.to(torch.int32))"),
        fix="the same type on every rank",
    ),
    Fault(
        "different reductions",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(x, dist.ReduceOp.MAX)"),
        fix="the same reduction",
    ),
    Fault(
        "different roots",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.broadcast(x, 0); dist.barrier()", "dist.broadcast(x, 1); dist.barrier()"),
        fix="the same root on every rank",
    ),
    Fault(
        "a forked child uses the group",
        "during",
        "forked-process",
        (1,),
        observers=(1,),
        body=FORMED + "def call():\n    dist.all_reduce(x)\nif faulty and rank == 1 and os.fork():\n"
        "    time.sleep(60)\nif faulty and rank == 0:\n    time.sleep(60)\n" + CALL,
        fix="use the group in the rank itself",
    ),
    Fault(
        "a rank ends the group while others wait",
        "during",
        "peer-lost",
        (1,),
        certain=False,
        observers=(0, 2),
        count=3,
        body=calls("dist.all_reduce(x)", "time.sleep(0.3); say(fault=True); dist.destroy_process_group()"),
    ),
    Fault(
        "a key that nobody sets",
        "during",
        "store-timeout",
        (),
        certain=False,
        body=FORMED + "def call():\n    store = dist.distributed_c10d._get_default_store()\n"
        "    store.wait(['never'], TIMEOUT)\n" + CALL,
        fix="set the key",
    ),
]

AFTER = [
    Fault(
        "a collective without a group",
        "after",
        "not-initialised",
        (),
        body="def call():\n    dist.all_reduce(x)\nif not faulty:\n    init()\n" + CALL,
        fix="init first",
    ),
    Fault(
        "a collective after destroy",
        "after",
        "already-destroyed",
        (),
        body=FORMED + "if faulty:\n    dist.barrier()\n    end()\ndef call():\n    dist.all_reduce(x)\n" + CALL,
        fix="destroy last",
    ),
    Fault(
        "init twice",
        "after",
        "already-initialised",
        (),
        body=FORMED + "def call():\n    init()\n" + CALL,
        fix="init once",
    ),
]

LOOKED = [
    Fault(
        "shared memory of a container is full",
        "doctor",
        "shm-too-small",
        (),
        look=full_shm,
        body=SHARE,
        count=1,
        certain=True,
    ),
    Fault("a container with too little memory", "doctor", "memory-low", (), look=little_memory, alone="does not look"),
    Fault("a container with few processes", "doctor", "process-limit", (), look=few_processes, alone="does not look"),
    Fault("a stale worker holds the port", "doctor", "stale-worker", (), look=stale_worker, alone="does not look"),
]

FAULTS = [*BEFORE, *DURING, *AFTER, *LOOKED]
