"""The fault laboratory: one fault is injected under torch alone and under allhands, and both are timed.

A fault is one script that runs with either library. Then what the message under `fix:` names is done, and nothing
else: the fault is injected once more, the fix is applied to it, and the job has to form its group.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts.conftest import Host
from ranks.harness import Job, free_port, running

__all__ = [
    "AT_ONCE_S",
    "FOLDER",
    "INTO_S",
    "TIMEOUT_S",
    "Around",
    "Change",
    "Fault",
    "Finding",
    "Fix",
    "Site",
    "mended",
    "record",
    "told",
    "words",
]

# Where each fault leaves what was measured; `scripts/faults.py` makes the table of it.
FOLDER = Path(__file__).parents[2] / "build" / "faults"

# What both libraries are given to form a group and for each collective: short, so that the slow rows stay bearable.
TIMEOUT_S = 5.0

# Time within which a certain cause is reported.
AT_ONCE_S = 3.0

# torch needs up to three times its timeout; a rank without an error by then is recorded as such.
MOST_S = 30.0

# What the signal is sent into: a collective that has begun.
INTO_S = 0.3

HEAD = """
import datetime, json, os, signal, sys, time
if "HOST" in os.environ:
    from hosts.enter_host import enter, lay
    enter()
    if "RESOLVER" in os.environ:
        lay(os.environ["RESOLVER"], "/etc/resolv.conf")
import torch
ours, faulty = os.environ["LIBRARY"] == "allhands", os.environ["FAULTY"] == "1"
if ours:
    import allhands as dist
else:
    import torch.distributed as dist
METHOD, TIMEOUT = os.environ["METHOD"], datetime.timedelta(seconds=float(os.environ["TIMEOUT"]))
x = torch.ones(4)
def init(backend="gloo", method=METHOD, rank=rank, world_size=size, **more):
    dist.init_process_group(backend, init_method=method, timeout=TIMEOUT, rank=rank, world_size=world_size, **more)
def use():
    y = torch.ones(4)
    dist.all_reduce(y)
    assert y.tolist() == [float(size)] * 4
    say(formed=True)
def form(**kw):
    init(**kw)
    use()
def formed_by_environment():
    dist.init_process_group("gloo", timeout=TIMEOUT)
    use()
def variables():
    host, _, port = METHOD.removeprefix("tcp://").rpartition(":")
    for name, value in dict(RANK=rank, WORLD_SIZE=size, MASTER_ADDR=host, MASTER_PORT=port).items():
        if name not in os.environ.get("WITHOUT", "").split():
            os.environ.setdefault(name, str(value))
def end():
    if dist.is_initialized():
        dist.destroy_process_group()
gate("begin")
"""


@dataclass(slots=True)
class Site:
    """Where a fault is injected: a folder, an address, and the hosts where there are several."""

    folder: Path
    hosts: list[Host] = field(default_factory=list)
    port: int = 0
    library: str = "allhands"  # the one under test

    @property
    def method(self) -> str:
        """Where the ranks meet."""
        return f"tcp://{self.hosts[0].ipv4 if self.hosts else '127.0.0.1'}:{self.port}"

    def moved(self) -> Site:
        """Return the same site with a new port."""
        return Site(self.folder, self.hosts, 29500 if self.hosts else free_port())


@dataclass(frozen=True, slots=True)
class Change:
    """What a fix changes in a job: variables of all ranks (None unsets one), or what is done while it runs."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    during: Callable[[Job, Site], object] | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """The right fix: a pattern that the message must match, and a function that applies what it names.

    ``do`` gets what the pattern found. ``again`` says that nothing can be mended, and the job is run once more.
    """

    says: str
    do: Callable[[Site, re.Match[str]], Change]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The report of the doctor or the launcher, its duration, and its fix, which was applied with success."""

    slug: str
    what: str
    seconds: float
    fix: str
    by: str = "doctor"
    ranks: tuple[int, ...] = ()


Around = Callable[[Site], AbstractContextManager[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its injection, the expected diagnosis and ranks, and the fix that the message must have."""

    name: str
    when: str  # before, during or after the group exists; or found by the doctor
    slug: str
    ranks: tuple[int, ...]  # that the diagnosis names
    body: str = ""
    fix: Fix | None = None
    count: int = 2
    certain: bool = True
    observers: tuple[int, ...] = ()  # all, where none is given
    # Ranks with a different diagnosis: its slug and ranks.
    special: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # of single ranks, where that is the fault
    around: Around | None = None
    during: Callable[[Job, Site], float] | None = None
    layout: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()  # that the diagnosis names, if ranks do not imply them
    says: str = ""  # must be in the message
    look: Callable[[Site], Finding] | None = None  # if the doctor or the launcher finds it: runs and fixes it
    note: str = ""  # what torch has in the place of it, where it has nothing to be wrong about
    beside: Callable[[Site], tuple[str, float]] | None = None  # runs torch alone, if that needs more than the body
    timeout_s: float = TIMEOUT_S
    fresh: bool = False  # ranks are new interpreters

    @property
    def told(self) -> tuple[int, ...]:
        """Ranks that must get a diagnosis."""
        return self.observers or tuple(range(self.count))


def settings(fault: Fault, site: Site, library: str, extra: Mapping[str, str], change: Change) -> dict[str, Any]:
    """Return the arguments for `harness.start`."""
    env: dict[str, str | None] = {
        "LIBRARY": library,
        "FAULTY": "1",
        "METHOD": site.method,
        "TIMEOUT": str(fault.timeout_s),
        "FOLDER": str(site.folder),
    }
    each: dict[int, dict[str, str | None]] = {rank: dict(fault.env.get(rank, {})) for rank in range(fault.count)}
    for name, value in extra.items():
        # "1:NAME" is for rank 1 alone.
        rank_of, _, own = name.rpartition(":")
        (each[int(rank_of)] if rank_of else env)[own] = value
    for rank, host in enumerate(fault.layout):
        each[rank].update(site.hosts[host].environment())
    for part in (env, *each.values()):
        part.update({name: value for name, value in change.variables.items() if name in part or part is env})
    return {
        "source": HEAD + fault.body,
        "fresh": fault.fresh,
        "world_size": fault.count,
        "env": {name: value for name, value in env.items() if value is not None},
        "each": {
            rank: {name: value for name, value in part.items() if value is not None} for rank, part in each.items()
        },
    }


def told(fault: Fault, site: Site, library: str) -> dict[int, dict[str, Any]]:
    """Inject ``fault``; return the error of each observer, its time after the fault, and the exit status."""
    site.library = library
    with ExitStack() as stack:
        extra = stack.enter_context(fault.around(site)) if fault.around else {}
        made = settings(fault, site, library, extra, Change())
        job = stack.enter_context(running(**made, timeout=MOST_S + 10))
        began = time.monotonic()
        since = fault.during(job, site) if fault.during else None
        while True:
            job.poll()
            said = {number: job.ranks[number].said() for number in fault.told}
            heard = {number: _last(lines, "outcome") for number, lines in said.items()}
            codes = {number: job.ranks[number].returncode for number in fault.told}
            if all(heard[number] is not None or codes[number] is not None for number in fault.told):
                break
            if time.monotonic() - began > MOST_S:
                break
            time.sleep(0.01)
        marks = [line["at"] for entry in job.ranks for line in entry.said() if "fault" in line]
        since = since if since is not None else (min(marks) if marks else None)
        found = {}
        for number in fault.told:
            outcome = heard[number] or {"kind": "", "over": time.time(), "seconds": time.monotonic() - began}
            seconds = outcome["over"] - since if since is not None else outcome["seconds"]
            found[number] = {
                **outcome,
                "after": max(0.0, seconds),
                "spoke": heard[number] is not None,
                "code": codes[number],
                "stderr": job.ranks[number].stderr.read_text(errors="replace"),
            }
        return found


def _last(lines: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = [line[key] for line in lines if key in line]
    return found[-1] if found else None


def mended(fault: Fault, fix: Fix, site: Site, said: str) -> None:
    """Inject the fault again and apply ``said``, the fix of its message; every rank must form the group."""
    match = re.search(fix.says, said)
    assert match is not None, f"the fix does not say {fix.says!r}: {said}"
    site.library = "allhands"
    with ExitStack() as stack:
        extra = stack.enter_context(fault.around(site)) if fault.around else {}
        change = fix.do(site, match)
        made = settings(fault, site, "allhands", extra, change)
        job = stack.enter_context(running(**made))
        if change.during is not None:
            change.during(job, site)
        results = job.results()
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}, after: {said}\n{result.stdout}\n{result.stderr}"
        assert result["formed"], result.stdout


# The table ----------------------------------------------------------------------------------------------------

# What C++ puts before its messages, and where they come from.
_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|h|hpp):\d+\]\s*|^\[[WE]\d[^\]]*\]\s*")
# Folders of the machine that torch was built on.
_PATH = re.compile(r"(?<![\w.])/[\w./-]*/")
_LONG = 150


# Lines that only repeat the exception with the number of a socket; or state that the laboratory's addresses have no
# names, which is no fault.
_REPEATS = (
    "hostname of the client socket cannot be retrieved",
    "waitForInput",
    "recvValueWithTimeout",
    "sendBytes",
    "client socket has timed out",
)


def words(outcomes: Mapping[int, Mapping[str, Any]]) -> str:
    """Return in one line the errors of the ranks under torch alone, each with its time; equal ones once."""
    groups: dict[str, list[int]] = {}
    for number, found in outcomes.items():
        whole = f"{found['kind']} {found.get('text', '').partition(chr(10))[0]}"
        value = _said(found) if not found["kind"] else ""
        groups.setdefault(re.sub(r"\d+", "0", whole) + value, []).append(number)
    if len(groups) == 1:
        return _said(next(iter(outcomes.values())))
    parts = []
    for numbers in groups.values():
        found = max((outcomes[number] for number in numbers), key=lambda each: float(each["after"]))
        late = f" ({found['after']:.1f} s)" if found["spoke"] else ""
        parts.append(f"[{','.join(map(str, numbers))}] {_said(found)}{late}")
    return "; ".join(parts)


def _said(found: Mapping[str, Any]) -> str:
    if not found["spoke"]:
        if found["code"] is None:
            return f"nothing in {found['after']:.0f} s"
        last = _short(found["stderr"].strip().rpartition("\n")[2])
        return f"the process ends with {'signal' if found['code'] < 0 else 'status'} {abs(found['code'])}" + (
            f": {last}" if last else ""
        )
    if not found["kind"]:
        value = f", x is {found['x']}" if "x" in found else ""
        return f"nothing: the call returns{value}"
    said = f"{found['kind']}: {_short(found['text'])}"
    lines = [line for line in found["stderr"].splitlines() if re.match(r"\[[WE]\d", line)]
    warned = [_short(line) for line in lines if not any(word in line for word in _REPEATS)]
    news = [line for line in warned if line[:30] not in said]
    return f"{said} (on stderr: {news[0]})" if news else said


def _short(text: str) -> str:
    line = next((each for each in text.splitlines() if each.strip()), "").strip()
    line = _PLACE.sub("", line) if "://" in line else _PATH.sub("", _PLACE.sub("", line))
    return line if len(line) <= _LONG else line[: _LONG - 1].rstrip() + "…"


def record(fault: Fault, site: Site, torch_alone: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Write down what was measured, one file for each fault, so that several processes may run them."""
    import torch

    FOLDER.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", fault.name.lower()).strip("-")
    made = {
        "name": fault.name,
        "when": fault.when,
        "certain": fault.certain,
        "ranks": list(fault.ranks),
        "again": fault.fix is not None and fault.fix.again,
        "torch_alone": dict(torch_alone),
        "allhands": dict(ours),
        "torch": torch.__version__,
        "timeout_s": fault.timeout_s,
        "on": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(made, indent=1, ensure_ascii=False).replace(str(site.folder), "")
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
