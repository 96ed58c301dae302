"""Faults of ranks in a group: deaths, late ranks, different calls; and calls without a group."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping

from faults import rollcalls
from ranks.harness import Job
from soak.laboratory import INTO_S, Change, Fault, Fix, Site
from soak.remedies import AGAIN, code
from soak.scripts import CALL, FORMED, HIT, calls, dies, send

__all__ = ["FAULTS"]

ALIKE = code("^make the call of rank 1 the same as the others'")


@contextlib.contextmanager
def victim_0(_: Site) -> Iterator[Mapping[str, str]]:
    """Let rank 0 be the one that is hit."""
    yield {"VICTIM": "0"}


# A rank that is stopped before its call, and makes it once it continues.
STOPPED = (
    FORMED
    + """
say(ready=True)
if faulty and rank == 1:
    time.sleep(1)
def call():
    dist.all_reduce(x)
"""
    + CALL
)


def goes_on(_: Site, match: re.Match[str]) -> Change:
    """Stop the rank again, and run the command of the message in time: `kill -CONT PID`."""
    assert int(match["pid"]) > 1

    def during(job: Job, site: Site) -> None:
        send(signal.SIGSTOP, 1)(job, site)
        time.sleep(1.5)
        job.signal(1, signal.SIGCONT)

    return Change(during=during)


@contextlib.contextmanager
def store_apart(site: Site) -> Iterator[Mapping[str, str]]:
    """Run torch's store in a process of its own, as torchrun does; allhands' coordinator always is one."""
    if site.library == "allhands":
        yield {}
        return
    with rollcalls.service("tcpstore") as (port, pid):
        yield {"STORE": str(port), "STORE_PID": str(pid)}


# The rank reports the process of the coordinator or store; then all ranks make collectives.
COORDINATED = (
    """
if ours:
    init()
    pid = dist.groups.session.current().coordinator_process.pid if rank == 0 and faulty else 0
else:
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), size, False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    pid = int(os.environ["STORE_PID"])
gate('formed')
say(pid=pid)
say(ready=True)
def call():
    # torch's collectives need no store, so a store request follows.
    over = time.monotonic() + 3
    while ours or time.monotonic() < over:
        dist.all_reduce(x)
    dist.new_group([0, 1])
"""
    + CALL
)


def coordinator(job: Job, _: Site) -> float:
    """Kill the process that rank 0 started to coordinate, or the one that holds torch's store."""
    pid = job.wait_for("pid")[0]
    job.wait_for("ready")
    time.sleep(INTO_S)
    os.kill(pid, signal.SIGKILL)
    return time.time()


DURING = [
    Fault(
        "a rank raises in mid-training",
        "during",
        "peer-failed",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("os.environ['NO_SUCH_VARIABLE']").replace(
            "attempt(call) if faulty", "(attempt(call) if rank != 1 else call()) if faulty"
        ),
        says="NO_SUCH_VARIABLE",
        fix=code("^correct the KeyError on rank 1;"),
    ),
    Fault(
        "a rank calls sys.exit(3)",
        "during",
        "peer-lost",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("sys.exit(3)"),
        fix=code(r"^let rank 1 come to all_reduce \(script.py:\d+\) too"),
    ),
    Fault(
        "a rank calls os._exit(4)",
        "during",
        "peer-lost",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("os._exit(4)"),
        fix=AGAIN,
    ),
    Fault(
        "a rank crashes (SIGSEGV)",
        "during",
        "peer-lost",
        (1,),
        count=3,
        observers=(0, 2),
        body=dies("os.kill(os.getpid(), signal.SIGSEGV)"),
        fix=AGAIN,
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
        fix=AGAIN,
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
        fix=AGAIN,
    ),
    Fault(
        "kill -9 of the coordinator (torch: of its store's process)",
        "during",
        "coordinator-lost",
        (0,),
        count=3,
        body=COORDINATED,
        around=store_apart,
        during=coordinator,
        fix=AGAIN,
    ),
    Fault(
        "a rank is stopped (SIGSTOP)",
        "during",
        "peer-silent",
        (1,),
        count=3,
        observers=(0, 2),
        certain=False,
        body=STOPPED,
        during=send(signal.SIGSTOP, 1),
        fix=Fix(r"T is stopped, and `kill -CONT (?P<pid>\d+)` lets it go on", goes_on),
    ),
    Fault(
        "a rank is slower than the timeout",
        "during",
        "collective-timeout",
        (1,),
        count=3,
        observers=(0, 2),
        certain=False,
        body=calls("dist.all_reduce(x)", "time.sleep(8); dist.all_reduce(x)"),
        fix=Fix(
            r"^see what keeps rank 1 from coming to script.py:\d+ in time, or give the call a longer timeout \(",
            lambda _, __: Change({"TIMEOUT": "20"}),
        ),
    ),
    Fault(
        "a rank skips a collective and makes the next",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x); dist.barrier()", "dist.barrier()"),
        fix=ALIKE,
    ),
    Fault(
        "all_reduce against broadcast",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.broadcast(x, 1); dist.barrier()"),
        fix=ALIKE,
    ),
    Fault(
        "tensors of different size",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(torch.ones(5))"),
        fix=ALIKE,
    ),
    Fault(
        "tensors of different type",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(x.to(torch.int32))"),
        fix=ALIKE,
    ),
    Fault(
        "different reductions",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.all_reduce(x)", "dist.all_reduce(x, dist.ReduceOp.MAX)"),
        fix=ALIKE,
    ),
    Fault(
        "different roots",
        "during",
        "collective-mismatch",
        (1,),
        count=3,
        body=calls("dist.broadcast(x, 0); dist.barrier()", "dist.broadcast(x, 1); dist.barrier()"),
        fix=ALIKE,
    ),
    Fault(
        "a forked child uses the group",
        "during",
        "forked-process",
        (1,),
        observers=(1,),
        body=FORMED + "def call():\n    dist.all_reduce(x)\nif faulty and rank == 1 and os.fork():\n"
        "    time.sleep(60)\nif faulty and rank == 0:\n    time.sleep(60)\n" + CALL,
        fix=code("^communicate in the parent"),
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
        fix=code(r"^let rank 1 come to all_reduce \(script.py:\d+\) too"),
    ),
    Fault(
        "a store key that no rank sets",
        "during",
        "store-timeout",
        (),
        certain=False,
        body=FORMED
        + """
store = dist.distributed_c10d._get_default_store()
if rank == 0 and "KEY" in os.environ:
    store.set(os.environ["KEY"], b"1")
def call():
    store.wait(['never'], TIMEOUT)
"""
        + CALL,
        # torch prefixes the key with the prefix of its own store.
        fix=Fix("^see that a rank sets '0//(?P<key>never)' before", lambda _, match: Change({"KEY": match["key"]})),
    ),
]

AFTER = [
    Fault(
        "a collective without a group",
        "after",
        "not-initialised",
        (),
        body="def call():\n    dist.all_reduce(x)\nif not faulty:\n    init()\n" + CALL,
        fix=code(r"^call allhands.init_process_group\(\) first"),
    ),
    Fault(
        "a collective after destroy",
        "after",
        "already-destroyed",
        (),
        body=FORMED + "if faulty:\n    dist.barrier()\n    end()\ndef call():\n    dist.all_reduce(x)\n" + CALL,
        fix=code("^move the call before it"),
    ),
    Fault(
        "init twice",
        "after",
        "already-initialised",
        (),
        body=FORMED + "def call():\n    init()\n" + CALL,
        fix=code("or use the group that is there"),
    ),
]

FAULTS = [*DURING, *AFTER]
