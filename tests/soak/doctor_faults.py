"""Faults of one machine that the doctor or the launcher finds: limits, leftovers, memory that runs out."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from faults.test_doctor import DOCTOR, MEMORY, PIDS, STALE, group, of
from ranks.harness import environment
from ranks.runner import run
from soak.laboratory import Around, Fault, Finding, Site
from soak.scripts import FORM

__all__ = ["FAULTS"]


class Shell:
    """A shell in a container of its own, into which commands are typed one after the other."""

    def __init__(self, *before: str) -> None:
        self._process = subprocess.Popen(
            [*before, "bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment({})
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def type(self, command: str) -> str:
        """Run one command; return what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\necho; echo ---over\n")
        self._process.stdin.flush()
        lines = iter(self._process.stdout.readline, "")
        said = []
        for line in lines:
            if line == "---over\n":
                return "".join(said)
            said.append(line)
        raise AssertionError(f"the shell ended in {command!r}: {''.join(said)}")

    def look(self, check: str, *words: str) -> tuple[dict[str, Any], float]:
        """Return one finding of the doctor, and how long it took."""
        began = time.monotonic()
        said = self.type(shlex.join([*DOCTOR, *words, "--json"]))
        took = time.monotonic() - began
        return of(json.loads(said), check), took


def seen(found: Mapping[str, Any], took: float, after: Mapping[str, Any]) -> Finding:
    """Return what was found; with its fix done, it must be green."""
    assert after["level"] == "green", after
    return Finding(found["slug"], found["what"], took, found["fix"])


# Limits -------------------------------------------------------------------------------------------------------

# Enough processes and threads for the doctor, not for four ranks.
FEW = "10"
LITTLE = 400 << 20


def few_processes(_: Site) -> Finding:
    """Look in a container that may have few processes; then raise that limit."""
    with group(PIDS, pids_dot_max=FEW) as inside, Shell(*inside) as shell:
        found, took = shell.look("processes")
        assert "raise the limit (ulimit -u, TasksMax= in a service, --pids-limit of a container)" in found["fix"]
        _raise(found, "pids.max", "max")
        return seen(found, took, shell.look("processes")[0])


def little_memory(_: Site) -> Finding:
    """Look in a container that may use 400 MiB; then raise that limit."""
    with group(MEMORY, memory_dot_limit_in_bytes=str(LITTLE)) as inside, Shell(*inside) as shell:
        found, took = shell.look("memory", "-n", "2")
        assert "raise the limit of the container or control group" in found["fix"]
        _raise(found, "memory.limit_in_bytes", "-1")
        return seen(found, took, shell.look("memory", "-n", "2")[0])


def _raise(found: Mapping[str, Any], name: str, value: str) -> None:
    """Raise the limit of the control group that the evidence names."""
    match = re.search(r"(/sys/fs/cgroup/\S*allhands-test-\d+)", found["why"])
    assert match is not None, found["why"]
    (Path(match[1]) / name).write_text(value)


def limited(controller: Path, **limits: str) -> Around:
    """Return what makes a control group for ranks to go into."""

    @contextlib.contextmanager
    def around(_: Site) -> Iterator[Mapping[str, str]]:
        with group(controller, **limits) as inside:
            yield {"GROUP": inside[2].split()[3]}

    return around


# Ranks that go into the control group, form a group there and use it.
INSIDE = "open(os.environ['GROUP'], 'w').write(str(os.getpid()))\n"
HUNGRY = INSIDE + "def large():\n    init()\n    dist.all_reduce(torch.ones(64 << 20))\nsay(outcome=attempt(large))\n"


def full_shm(_: Site) -> Finding:
    """Run the doctor in a container whose shared memory is full; then run the command of its fix."""
    with Shell("unshare", "-m") as shell:
        shell.type("mount -t tmpfs -o size=64m tmpfs /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=1M count=60 2>&-")
        found, took = shell.look("shm")
        assert "start the container with --shm-size=1g" in found["fix"]
        # The size that the option sets; this sets it for a running container.
        shell.type(next(each for each in found["commands"] if "remount,size=1g" in each))
        return seen(found, took, shell.look("shm")[0])


# The memory use of a DataLoader for each batch, in a container whose shared memory is full.
SHARE = """
import ctypes, subprocess
from hosts.enter_host import CLONE_NEWNS, MS_PRIVATE, MS_REC
libc = ctypes.CDLL(None)
assert libc.unshare(CLONE_NEWNS) == 0
assert libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
with open("/dev/shm/full", "wb") as full:
    full.write(bytes(60 << 20))
say(outcome=attempt(lambda: torch.zeros(25 << 20).share_memory_()))
"""


# Leftovers ----------------------------------------------------------------------------------------------------


def stale_worker(site: Site) -> Finding:
    """Check a port that a worker without its launcher holds, adopted by process 1; then end it."""
    with Shell("unshare", "--pid", "--fork", "--kill-child", "--mount-proc") as shell:
        place = site.folder / "stale"
        shell.type(f"TORCHELASTIC_RUN_ID=x {sys.executable} -c {shlex.quote(STALE)} > {place}")
        pid, port = shell.type(f"until [ -s {place} ]; do sleep 0.05; done; cat {place}").split()
        time.sleep(2.2)  # younger ones may have a launcher that is just ending
        found, took = shell.look("leftovers", f"127.0.0.1:{port}")
        assert f"pid {pid} holds port {port}" in found["what"]
        assert found["commands"] == [f"kill {pid}"]
        shell.type(found["commands"][0])
        return seen(found, took, shell.look("leftovers", f"127.0.0.1:{port}")[0])


@contextlib.contextmanager
def left_over(site: Site) -> Iterator[Mapping[str, str]]:
    """Leave a worker on the port of the job."""
    place = site.folder / "left"
    with place.open("w") as out:
        source = STALE.replace("if os.fork():", "if False:")
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdout=out, env=environment({"TORCHELASTIC_RUN_ID": "x"})
        )
    try:
        while not (said := place.read_text()):
            time.sleep(0.02)
        site.port = int(said.split()[1])
        yield {"METHOD": site.method}
    finally:
        process.kill()
        process.wait()


# Memory that runs out ------------------------------------------------------------------------------------------

# Rank 1 allocates a gigabyte, step by step, and records the time; the others wait for it.
GREEDY = """
import os, time
import torch
import {} as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    held = []
    for step in range(128):
        held.append(bytearray(b"x") * (8 << 20))
        with open(os.environ["LAST"], "w") as last:
            last.write(str(time.time()))
dist.all_reduce(torch.ones(1))
print("formed", flush=True)
dist.destroy_process_group()
"""
ROOM = 900 << 20


def out_of_memory(site: Site) -> Finding:
    """Run a job in a control group that is too small for it; then give it more memory."""
    last, source = site.folder / "last", GREEDY.format("allhands")
    with group(MEMORY, memory_dot_limit_in_bytes=str(ROOM)) as inside:
        ran = run(source, before=inside, env={"LAST": str(last)})
        took = time.time() - float(last.read_text())
        assert (ran.report["cause"], ran.report["culprits"], ran.code) == ("oom", [1], 137), (ran.report, ran.err)
        assert "give the job more memory, or each rank less to do" in ran.report["fix"], ran.report
        Path(inside[2].split()[3]).with_name("memory.limit_in_bytes").write_text("-1")
        after = run(source, before=inside, env={"LAST": str(last)})
        assert (after.code, after.out.count("formed")) == (0, 2), after.err
    return Finding("oom", ran.report["what"], took, ran.report["fix"], by="run", ranks=(1,))


def out_of_memory_alone(site: Site) -> tuple[str, float]:
    """Run the same job with torchrun."""
    last, script = site.folder / "last-alone", site.folder / "train.py"
    script.write_text(GREEDY.format("torch.distributed"))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(site.port)]
    with group(MEMORY, memory_dot_limit_in_bytes=str(ROOM)) as inside:
        done = subprocess.run(
            [*inside, *start, str(script)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=environment({"LAST": str(last)}),
        )
        took = time.time() - float(last.read_text())
    root = done.stderr.partition("Root Cause (first observed failure):")[2]
    said = [" ".join(line.split()) for line in root.splitlines() if re.match(r"\s*(rank|exitcode|traceback)\s*:", line)]
    return f"torchrun, root cause (first observed failure): {', '.join(said)}", took


FAULTS = [
    Fault(
        "the out-of-memory killer ends a rank",
        "during",
        "oom",
        (1,),
        look=out_of_memory,
        beside=out_of_memory_alone,
    ),
    Fault(
        "shared memory of a container is full",
        "doctor",
        "shm-too-small",
        (),
        look=full_shm,
        body=SHARE,
        count=1,
    ),
    Fault(
        "a container with too little memory",
        "doctor",
        "memory-low",
        (),
        look=little_memory,
        around=limited(MEMORY, memory_dot_limit_in_bytes=str(LITTLE)),
        body=HUNGRY,
    ),
    Fault(
        "a container with few processes",
        "doctor",
        "process-limit",
        (),
        look=few_processes,
        around=limited(PIDS, pids_dot_max=FEW),
        count=4,
        body=INSIDE + FORM,
    ),
    Fault(
        "a stale worker holds the port",
        "doctor",
        "stale-worker",
        (),
        look=stale_worker,
        around=left_over,
        body=FORM,
    ),
]
