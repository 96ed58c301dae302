"""The ranks on this machine and which of them make up one job: found in /proc, without the help of any of them."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from ..observe import flight_recorder
from .proc_status import Look, look, processes

__all__ = ["Crew", "Rank", "crews", "refresh"]

# By which the ranks of one launch are known to belong together, most telling first.
_MARKS = ("ALLHANDS_COORDINATOR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMI_ID")

# Shared memory of a group: whoever maps the same one is in the same group.
_SEGMENT = "/memfd:allhands (deleted)"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. ``number`` is -1 where the process has not said which it is; ``board`` None where there is none."""

    pid: int
    number: int
    world_size: int
    seen: Look
    board: flight_recorder.FlightRecorder | None


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one job on this machine, in order, and the process that started them where all have the same one."""

    name: str
    ranks: tuple[Rank, ...]
    parent: int
    world_size: int

    @property
    def pids(self) -> list[int]:
        """The processes of its ranks."""
        return [rank.pid for rank in self.ranks]


def crews() -> list[Crew]:
    """Return every job that has ranks on this machine, as far as this user may see."""
    found = [rank for rank in map(_rank, processes()) if rank is not None]
    return [_crew(members) for members in _together(_outermost(found))]


def refresh(crew: Crew) -> Crew:
    """Return the same ranks as they are now; those that have ended are left out."""
    now = [
        replace(rank, seen=seen, board=flight_recorder.read_owned(rank.pid, seen.inner_pid))
        for rank in crew.ranks
        if (seen := look(rank.pid)) is not None and not seen.zombie
    ]
    return replace(crew, ranks=tuple(now))


def _rank(pid: int) -> Rank | None:
    seen = look(pid)
    if seen is None or seen.zombie or pid == os.getpid():
        return None
    board = flight_recorder.read_owned(pid, seen.inner_pid)
    told = _told(seen)
    if board is None and told is None:
        return None
    number, size = (board.rank, board.world_size) if board is not None and board.rank >= 0 else told or (-1, 0)
    return Rank(pid, number, size, seen, board)


def _told(seen: Look) -> tuple[int, int] | None:
    """Return rank and world size from the environment that a process was started with."""
    # Of those that are started as ranks, only what runs Python can be one: not the shells around them.
    if not Path(seen.command.partition(" ")[0]).name.startswith(("python", "pypy")):
        return None
    for rank, size in (("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE"), ("RANK", "WORLD_SIZE")):
        number, many = seen.environ.get(rank, ""), seen.environ.get(size, "")
        if number.isdecimal() and many.isdecimal():
            return int(number), int(many)
    return None


def _outermost(found: list[Rank]) -> list[Rank]:
    """Leave out what a rank itself started: it has the rank's variables too, but no board of its own."""
    by_pid = {rank.pid: rank for rank in found}

    def started_by_a_rank(rank: Rank) -> bool:
        pid = rank.seen.parent
        while pid > 1:
            above = by_pid.get(pid)
            # A rank may also start a job of its own, with other variables.
            if above is not None and (above.number, above.world_size) == (rank.number, rank.world_size):
                return True
            seen = look(pid)
            if seen is None:
                return False
            pid = seen.parent
        return False

    return [rank for rank in found if rank.board is not None or not started_by_a_rank(rank)]


def _together(found: list[Rank]) -> list[list[Rank]]:
    """Put ranks together that share a mark, a group's memory, an address; else those of one parent."""
    groups: dict[str, list[Rank]] = defaultdict(list)
    # Each group's memory belongs to the set of whoever maps any part of it.
    segments = {rank.pid: _segments(rank.pid) for rank in found}
    sets: list[set[int]] = []
    for own in segments.values():
        touching = [each for each in sets if each & own]
        sets = [each for each in sets if not each & own] + ([own.union(*touching)] if own else [])
    for rank in found:
        shared = next((number for number, each in enumerate(sets) if each & segments[rank.pid]), None)
        groups[_key(rank, shared)].append(rank)
    return list(groups.values())


def _key(rank: Rank, shared: int | None) -> str:
    env = rank.seen.environ
    for name in _MARKS:
        if env.get(name):
            return f"{name}={env[name]} {env.get('MASTER_PORT', '')}"
    if env.get("RANK") and env.get("MASTER_PORT"):
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    if shared is not None:
        return f"memory {shared}"
    return f"parent {rank.seen.parent} of {rank.world_size}"


def _segments(pid: int) -> set[int]:
    """Return the inodes of the groups' memory that ``pid`` has mapped."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.endswith(_SEGMENT):
                found.add(int(line.split()[4]))
    except OSError:
        return set()
    return found


def _crew(members: list[Rank]) -> Crew:
    ordered = tuple(sorted(members, key=lambda rank: (rank.number, rank.pid)))
    env = ordered[0].seen.environ
    parents = {rank.seen.parent for rank in ordered}
    name = env.get("ALLHANDS_JOB") or env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID") or ""
    size = max(rank.world_size for rank in ordered)
    return Crew(name, ordered, parents.pop() if len(parents) == 1 else 0, size)
