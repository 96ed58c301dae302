"""The fault laboratory: one fault is injected twice, under torch alone and under allhands, and both are timed.

A fault is one script that runs with either library. Without its `faulty` lines, or without what `around` had put in
the way, the same script is the fixed job, and has to form its group.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts.conftest import Host
from ranks.harness import Job, Result, free_port, launch, running

__all__ = ["AT_ONCE_S", "FOLDER", "TIMEOUT_S", "Fault", "Finding", "Site", "fixed", "record", "told", "words"]

# Where each fault leaves what was measured; `scripts/faults.py` makes the table of it.
FOLDER = Path(__file__).parents[2] / "build" / "faults"

# What both libraries are given to form a group and for each collective: short, so that the slow rows stay bearable.
TIMEOUT_S = 5.0

# A certain cause is told within this.
AT_ONCE_S = 3.0

# torch takes up to three times its timeout; what has said nothing then is noted as such.
MOST_S = 30.0

# What the signal is sent into: a collective that has begun.
INTO_S = 0.3

HEAD = """
import datetime, os, signal, sys, time
if "HOST" in os.environ:
    from hosts.hostside import enter, lay
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
def init(backend="gloo", method=METHOD, rank=rank, world_size=size):
    dist.init_process_group(backend, init_method=method, timeout=TIMEOUT, rank=rank, world_size=world_size)
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
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=port)
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
    library: str = "allhands"  # which one is being asked

    @property
    def method(self) -> str:
        """Where the ranks meet."""
        return f"tcp://{self.hosts[0].ipv4 if self.hosts else '127.0.0.1'}:{self.port}"

    def moved(self) -> Site:
        """Return the same place with a port that nobody has used yet."""
        return Site(self.folder, self.hosts, 29500 if self.hosts else free_port())


@dataclass(frozen=True, slots=True)
class Finding:
    """What the doctor said, and after how long."""

    slug: str
    what: str
    seconds: float


Around = Callable[[Site], AbstractContextManager[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: how it is injected, whom it is to be told, and in what words it must be named."""

    name: str
    when: str  # before, during or after the group is formed; or where the doctor looks
    slug: str
    ranks: tuple[int, ...]  # who is named by it
    body: str = ""
    count: int = 2
    certain: bool = True
    observers: tuple[int, ...] = ()  # all, where none is given
    special: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    around: Around | None = None
    during: Callable[[Job, Site], float] | None = None
    layout: tuple[int, ...] = ()
    fix: str = ""
    host: str = ""  # must be among the hosts that are named, or in the words
    look: Callable[[Site], Finding] | None = None  # the doctor is who finds it
    alone: str = ""  # why torch alone is not asked
    timeout_s: float = TIMEOUT_S
    either: bool = False  # all ranks have the fault, and who is heard first is named

    @property
    def told(self) -> tuple[int, ...]:
        """Who is to be told."""
        return self.observers or tuple(range(self.count))


def settings(fault: Fault, site: Site, library: str, *, faulty: bool, extra: Mapping[str, str]) -> dict[str, Any]:
    """Return what `harness.start` takes."""
    env = {
        "LIBRARY": library,
        "FAULTY": str(int(faulty)),
        "METHOD": site.method,
        "TIMEOUT": str(fault.timeout_s),
        **extra,
    }
    env["FOLDER"] = str(site.folder)
    each = {rank: site.hosts[host].environment() for rank, host in enumerate(fault.layout)}
    return {"source": HEAD + fault.body, "world_size": fault.count, "env": env, "each": each}


def told(fault: Fault, site: Site, library: str) -> dict[int, dict[str, Any]]:
    """Inject ``fault``; return for each observer what it was told, how long after the fault, and how it ended."""
    site.library = library
    with contextlib.ExitStack() as stack:
        extra = stack.enter_context(fault.around(site)) if fault.around else {}
        made = settings(fault, site, library, faulty=True, extra=extra)
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


def fixed(fault: Fault, site: Site) -> list[Result]:
    """Run the same job with the fix applied; fail unless every rank forms the group and uses it."""
    made = settings(fault, site, "allhands", faulty=False, extra={})
    results = launch(made.pop("source"), made.pop("world_size"), **made)
    for result in results:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        assert result["formed"], result.stdout
    return results


# The table ----------------------------------------------------------------------------------------------------

# What C++ puts before its messages, and where they come from.
_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|h|hpp):\d+\]\s*|^\[[WE]\d[^\]]*\]\s*")
# Folders of the machine that torch was built on.
_PATH = re.compile(r"(?<![\w.])/[\w./-]*/")
_LONG = 150


# What only repeats, with the number of a socket, that the exception came; and that the laboratory's addresses have no
# names, which is no fault.
_REPEATS = (
    "hostname of the client socket cannot be retrieved",
    "waitForInput",
    "recvValueWithTimeout",
    "sendBytes",
    "client socket has timed out",
)


def words(outcomes: Mapping[int, Mapping[str, Any]]) -> str:
    """Return in one line what the ranks under torch alone were told, each with its time; equal words once."""
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


def record(
    fault: Fault, site: Site, torch_alone: Mapping[str, Any], ours: Mapping[str, Any], *, fix_works: bool
) -> None:
    """Write down what was measured, one file for each fault, so that several processes may run them."""
    import torch

    FOLDER.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", fault.name.lower()).strip("-")
    made = {
        "name": fault.name,
        "when": fault.when,
        "certain": fault.certain,
        "ranks": list(fault.ranks),
        "fix": fault.fix,
        "fix_works": fix_works,
        "torch_alone": dict(torch_alone),
        "allhands": dict(ours),
        "torch": torch.__version__,
        "timeout_s": fault.timeout_s,
        "on": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(made, indent=1, ensure_ascii=False).replace(str(site.folder), "")
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
