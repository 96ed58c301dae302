"""Slurm: a task that srun started (a step), and Slurm's host lists and counts per node."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

from ..errors import AllhandsError, fail
from .base import Detection, lines, me, port, text

__all__ = ["MOST", "counts", "detect_slurm", "expand", "head", "in_step", "split"]

# The batch script and the shell of an interactive job are steps too, but srun did not start them.
# SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP of Slurm's headers, unsigned and signed.
_NOT_LAUNCHED = {"4294967291", "4294967290", "-5", "-6"}


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((text(env, name) for name in names if text(env, name)), "")


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process."""
    step = _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return bool(text(env, "SLURM_STEP_NODELIST") and text(env, "SLURM_PROCID")) and step not in _NOT_LAUNCHED


def detect_slurm(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task of a Slurm step."""
    if not in_step(env):
        return None
    found = Detection("slurm", "SLURM_STEP_NODELIST and SLURM_PROCID are set by srun", env)
    found.read(rank="SLURM_PROCID", world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    found.read(local_rank="SLURM_LOCALID", node_rank="SLURM_NODEID")
    _local_size(found)
    job, step = _first(env, "SLURM_JOB_ID", "SLURM_JOBID"), _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if job:
        found.set(f"SLURM_JOB_ID={job} and SLURM_STEP_ID={step or '0'}", job=f"slurm-{job}.{step or '0'}")
    reserved = text(env, "SLURM_STEP_RESV_PORTS")
    if reserved:
        first = expand(f"[{reserved}]")[0]
        why = f"SLURM_STEP_RESV_PORTS={reserved}"
        return found.locate(lambda: _host(env), port(int(first), why), why)
    return found.locate(lambda: _host(env))


def head(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the first host of the allocation (not of a step), "" where there is none."""
    hosts = expand(text(env, "SLURM_JOB_NODELIST"))
    return next(iter(hosts), ""), "the first host of SLURM_JOB_NODELIST"


def _local_size(found: Detection) -> None:
    tasks, node = text(found.env, "SLURM_STEP_TASKS_PER_NODE"), found.node_rank
    if tasks and node is not None:
        per_node = counts(tasks)
        if 0 <= node < len(per_node):
            found.set(f"SLURM_STEP_TASKS_PER_NODE={tasks}, node {node}", local_world_size=per_node[node])
    elif text(found.env, "SLURM_STEP_NUM_NODES") == "1":
        found.set("SLURM_STEP_NUM_NODES=1", local_world_size=found.world_size)


def _host(env: Mapping[str, str]) -> tuple[str, str]:
    """Return where rank 0 is. Not SLURM_LAUNCH_NODE_IPADDR: that is where srun was typed."""
    if text(env, "SLURM_DISTRIBUTION").startswith("arbitrary"):
        # The node list is sorted, but the tasks follow the user's order.
        listed = text(env, "SLURM_ARBITRARY_NODELIST")
        if text(env, "SLURM_HOSTFILE"):
            fix = "put the file where every node can read it, or set MASTER_ADDR to its first host"
            listed = " ".join(lines(env, "SLURM_HOSTFILE", fix))
            return next(iter(expand(listed)), ""), "the first host of SLURM_HOSTFILE"
        if listed:
            return expand(listed)[0], "the first host of SLURM_ARBITRARY_NODELIST"
        # srun -m arbitrary -w n2,n1 sets neither: the task cannot know rank 0's host.
        return "", ""
    hosts = expand(text(env, "SLURM_STEP_NODELIST"))
    return next(iter(hosts), ""), "the first host of SLURM_STEP_NODELIST"


# Slurm's own limit for one expression (MAX_SLURM_NODES): more is a typing error, and would fill the memory.
MOST = 65536

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def split(written: str) -> list[str]:
    """Split a list at the commas and white space that are not inside brackets."""
    items, item, inside = [], "", False
    for letter in written:
        if letter in "[]":
            if inside == (letter == "["):
                raise _malformed(written, f"a bracket is {'opened twice' if inside else 'closed but not open'}")
            inside = not inside
        if not inside and (letter == "," or letter.isspace()):
            items.append(item)
            item = ""
        else:
            item += letter
    if inside:
        raise _malformed(written, "a bracket is not closed")
    return [name for name in [*items, item] if name]


def expand(written: str) -> list[str]:
    """Return every host of a list, in order; raises `invalid-argument` if it is malformed."""
    hosts: list[str] = []
    for item in split(written):
        # Odd pieces were in brackets; the last bracket varies fastest, as in Slurm.
        pieces = re.split(r"[\[\]]", item)
        choices = [_numbers(written, piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > MOST:
            raise _malformed(written, f"it names more than {MOST} hosts")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def counts(written: str) -> list[int]:
    """Return the number of tasks of each node, in order: `2(x3),1` is 2, 2, 2, 1."""
    numbers: list[int] = []
    for item in written.replace(" ", "").split(","):
        match = _COUNT.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if match is None or len(numbers) + times > MOST:
            raise _malformed(written, f"{item!r} is not a count such as 2 or 2(x3)")
        numbers += [int(match[1])] * times
    return numbers


def _numbers(written: str, inside: str) -> list[str]:
    """Return the values of one bracket; leading zeros of a range's start set the width."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(written, f"{part!r} is not a number or a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _malformed(written, f"the range {part} goes backwards")
        if len(found) + int(last) - int(first) >= MOST:
            raise _malformed(written, f"it names more than {MOST} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _malformed(written: str, why: str) -> AllhandsError:
    shown = written if len(written) <= 80 else f"{written[:80]}…"
    return fail(
        "invalid-argument",
        f"{shown!r} is not a host list",
        who=me(),
        why=why,
        fix="a host list looks like node[01-04,07],gpu-a; if a script cut it off, use the scheduler's own variable",
    )
