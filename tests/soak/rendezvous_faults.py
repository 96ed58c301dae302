"""Faults of the rendezvous on one machine: missing ranks, other owners of the port, limits of a process."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from faults import rollcalls
from ranks.certificates import made, tls
from ranks.harness import Job, running
from soak.laboratory import INTO_S, Around, Change, Fault, Fix, Site
from soak.remedies import AGAIN, code, other_port, removed, started, unset
from soak.scripts import FORM

__all__ = ["FAULTS"]

# Those in ABSENT do not come.
PRESENT = "if str(rank) not in os.environ.get('ABSENT', '').split():\n"


def absent(rank: int, count: int) -> dict[int, dict[str, str]]:
    """Return the environment of ranks of which one does not come."""
    return {each: {"ABSENT": str(rank)} for each in range(count)}


def taken(name: str) -> Around:
    """Return what puts another service on the port of the job."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        with rollcalls.service(name) as (port, _):
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
    with running(rollcalls.JOB if ours else LEFT, 2, {"WHERE": site.method, "STOP": str(stop)}) as first:
        first.wait_for("formed")
        time.sleep(0.1)  # kernel start times are exact to 10 ms
        yield {}
        if ours:
            stop.with_suffix(".soon").touch()
            assert all(result["unharmed"] for result in first.results())


@contextlib.contextmanager
def left_file(site: Site) -> Iterator[Mapping[str, str]]:
    """Leave the file that a job of torch used which was then killed; it is gone after the block."""
    path = site.folder / "meeting"
    with running(LEFT, 2, {"WHERE": f"file://{path}"}) as job:
        job.wait_for("formed")
        for rank in (0, 1):
            job.signal(rank, signal.SIGKILL)
        job.results()
    yield {}
    path.unlink(missing_ok=True)


def certified(first: Mapping[str, str] | None, second: Mapping[str, str] | None) -> Around:
    """Return a context that gives rank 0 and rank 1 a certificate and an authority, or none."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        folder = site.folder / "tls"
        if not folder.exists():
            folder.mkdir()
            made(folder)
        given = ((0, first), (1, second))
        yield {
            f"{rank}:{name}": value
            for rank, side in given
            if side is not None
            for name, value in tls(folder, **side).items()
        }

    return around


def authority(site: Site, _: re.Match[str]) -> Change:
    """Give every rank the authority that signed the certificate."""
    return Change({"ALLHANDS_TLS_CA": str(Path(site.folder / "tls" / "ca.pem"))})


# The counterpart in torch: Gloo's own transport over TLS, requested on one rank.
TORCH_TLS = "if not ours and rank == {}:\n    os.environ['GLOO_DEVICE_TRANSPORT'] = 'TCP_TLS'\n"


def met(job: Job, site: Site) -> float:
    """Kill rank 0 when rank 1 has come to it and both wait for rank 2."""
    job.wait_for("ready")
    rollcalls.connected(job.ranks[1].pid, site.port)
    time.sleep(INTO_S)
    return job.signal(0, signal.SIGKILL)


FAULTS = [
    Fault(
        "a rank does not start",
        "before",
        "missing-ranks",
        (2,),
        count=3,
        certain=False,
        observers=(0, 1),
        env=absent(2, 3),
        body=PRESENT + "    say(outcome=attempt(form))\nend()\n",
        fix=started("^start rank 2 with this address"),
    ),
    Fault(
        "rank 0 does not start",
        "before",
        "connection-refused",
        (0,),
        certain=False,
        observers=(1,),
        env=absent(0, 2),
        body=PRESENT + "    say(outcome=attempt(form))\nend()\n",
        fix=started("^start rank 0 on that host"),
    ),
    Fault(
        "rank 0 does not start, with a file",
        "before",
        "missing-ranks",
        (0,),
        certain=False,
        observers=(1,),
        env=absent(0, 2),
        body=PRESENT
        + "    say(outcome=attempt(form, method=f'file://{os.environ[\"FOLDER\"]}/m' + str(ours)))\nend()\n",
        fix=started("^start rank 0 with the same address"),
    ),
    Fault(
        "a rank raises before init",
        "before",
        "missing-ranks",
        (1,),
        certain=False,
        observers=(0,),
        body="if faulty and rank:\n    raise ValueError('boom')\n" + FORM,
        fix=code("^start rank 1 .* or correct the error in its own output;"),
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
        fix=AGAIN,
    ),
    Fault(
        "a web server has the port",
        "before",
        "wrong-service",
        (0,),
        special={0: ("port-in-use", (0,))},
        around=taken("http"),
        body=FORM,
        fix=other_port(r"^choose another port \(MASTER_PORT, tcp://HOST:PORT"),
    ),
    Fault(
        "torch's store of another job has the port",
        "before",
        "port-in-use",
        (0,),
        around=taken("tcpstore"),
        special={1: ("coordinator-silent", (0,))},
        body=FORM,
        fix=other_port(r"or choose another port \(MASTER_PORT, tcp://HOST:PORT"),
    ),
    Fault(
        "a silent service has the port",
        "before",
        "port-in-use",
        (0,),
        around=taken("silent"),
        special={1: ("coordinator-silent", (0,))},
        body=FORM,
        fix=other_port(r"or choose another port \(MASTER_PORT, tcp://HOST:PORT"),
    ),
    Fault(
        "two jobs on one port",
        "before",
        "port-in-use",
        (0,),
        special={1: ("port-in-use", (1,))},
        around=another_job,
        body=FORM,
        fix=other_port(r"or choose another port \(MASTER_PORT, tcp://HOST:PORT"),
    ),
    Fault(
        "a file that a killed job left",
        "before",
        "stale-file",
        (0,),
        around=left_file,
        body="say(outcome=attempt(form, method=f'file://{os.environ[\"FOLDER\"]}/meeting'))\nend()\n",
        fix=removed(r"^remove it \(rm (?P<path>/\S+/meeting)\)"),
    ),
    Fault(
        "TLS on rank 0 only",
        "before",
        "wrong-service",
        (0,),
        special={0: ("missing-ranks", (1,))},
        around=certified({}, None),
        body=TORCH_TLS.format(0) + FORM,
        fix=Fix(r"ALLHANDS_TLS_CERT on rank 0\), set ALLHANDS_TLS_CA on this rank;", authority),
    ),
    Fault(
        "TLS on rank 1 only",
        "before",
        "wrong-service",
        (0,),
        special={0: ("missing-ranks", (1,))},
        around=certified(None, {}),
        body=TORCH_TLS.format(1) + FORM,
        fix=unset("^if the coordinator has no TLS, unset (?P<names>ALLHANDS_TLS_CA) on this rank"),
    ),
    Fault(
        "a rank has another certificate authority than rank 0",
        "before",
        "not-authorised",
        (),
        special={0: ("missing-ranks", (1,))},
        around=certified({}, {"ca": "other"}),
        body=TORCH_TLS.format(0) + TORCH_TLS.format(1) + FORM,
        says="the coordinator's certificate is not accepted",
        fix=Fix("^set ALLHANDS_TLS_CA on this rank to the certificate authority that signed", authority),
    ),
    Fault(
        "GLOO_SOCKET_IFNAME names no interface",
        "before",
        "interface-mismatch",
        (1,),
        says="GLOO_SOCKET_IFNAME=nosuch0",
        env={1: {"GLOO_SOCKET_IFNAME": "nosuch0"}},
        body=FORM,
        fix=unset("^unset (?P<names>GLOO_SOCKET_IFNAME) "),
    ),
    Fault(
        "too few file descriptors",
        "before",
        "fd-limit",
        (1,),
        body="import resource\nFEW = len(os.listdir('/proc/self/fd')) + 2\n"
        "MOST = int(os.environ.get('NOFILE', 0)) or FEW\n"
        "if rank:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))\n" + FORM,
        fix=Fix(r"before the job starts: ulimit -n (?P<most>\d+)", lambda _, match: Change({"NOFILE": match["most"]})),
    ),
]
