"""The interface of an environment, its result `Detection`, and the reading of values.

Which sources may differ (`identify` implements these rules):

- Arguments of the caller are never compared with anything.
- allhands' launcher and torchrun start the process itself. What is around them is not compared (torchrun inside
  Slurm: the Slurm task is the agent, not the rank).
- A task of Slurm, LSF, Flux or MPI may be the agent of a launcher inside it, if there is one task per node or one in
  all (mpirun inside an allocation starts one daemon per node). Then the inner launcher is used, if it gives both
  rank and size.
- RANK and WORLD_SIZE inside such a task are used if a launcher on the node set them: LOCAL_RANK is set, and WORLD_SIZE
  is a multiple of the number of tasks that fits RANK. Otherwise they may be left over from a shell: a disagreement.
- Every other difference is a disagreement: RANK=0 against SLURM_PROCID=3, Open MPI against PMI.
- A pod's index or a host name's number is read only if RANK is not set (in a JobSet the index restarts in every Job,
  RANK does not).
"""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..diagnosis import join
from ..errors import AllhandsError, fail
from .world import Address, World

__all__ = [
    "DEFAULT_PORT",
    "Detection",
    "Environment",
    "check_one_process",
    "integer",
    "lines",
    "me",
    "parse_address",
    "port",
    "processes_per_node",
    "text",
]

# torch's own default. Right where each rank 0 has a network address of its own (a pod, a training container).
DEFAULT_PORT = 29500

# Ports derived from a job's name: below Linux's ephemeral ports (from 32768), above the usual services.
_FIRST_DERIVED, _DERIVED = 20000, 10000

_Env = Mapping[str, str]
# Returns a host and where it was read; called only where an address is needed, since it may read a file.
_Host = Callable[[], tuple[str, str]]


class Environment(NamedTuple):
    """One launch environment."""

    # The value of `World.source`.
    name: str
    # The variables that must be set, in words.
    mark: str
    # Returns the values of the environment, None if the process is not in it.
    detect: Callable[[_Env], Detection | None]


def me() -> str:
    """Return this process's host and pid, for the `who` of a diagnosis."""
    return f"this process ({platform.node() or 'unknown host'}, pid {os.getpid()})"


def text(env: _Env, name: str) -> str:
    """Return a variable's value without surrounding white space; "" where it is unset or blank."""
    return env.get(name, "").strip()


def integer(env: _Env, name: str) -> int | None:
    """Return a variable's value as an integer, None where it is unset; raises `invalid-argument` for other text."""
    value = text(env, name)
    if not value:
        return None
    # int() would also take "1_0", "+1" and digits of other scripts, which no launcher writes.
    if not (value.isascii() and value.removeprefix("-").isdecimal()):
        raise fail(
            "invalid-argument",
            f"{name}={value!r} is not a whole number",
            who=me(),
            why="the variable was set by hand, or by a script whose own variable was empty or not expanded",
            fix=f"unset {name}, or give a whole number",
        )
    return int(value)


def port(number: int, where: str) -> int:
    """Return ``number`` if it can be a port, else raise `invalid-argument`."""
    if not 0 < number < 65536:
        raise fail(
            "invalid-argument",
            f"{where} is not a port",
            who=me(),
            why="a port is between 1 and 65535, and all ranks must know it beforehand, so it cannot be 0",
            fix="give a free port of rank 0's host",
        )
    return number


def lines(env: _Env, name: str, fix: str) -> list[str]:
    """Return the non-empty lines of the file that a variable names; raises `incomplete-environment`."""
    path = text(env, name)
    try:
        written = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise fail(
            "incomplete-environment",
            f"{name}={path} names the hosts of this job, but cannot be read",
            who=me(),
            why=f"{error.strerror or error}; some schedulers keep this file on the first node only",
            fix=fix,
        ) from error
    return [line.strip() for line in written.splitlines() if line.strip()]


class Detection(msgspec.Struct):
    """The values that one environment gives, each with the place where it was read; None if not given."""

    source: str
    reason: str
    env: _Env
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    coordinator: Address | None = None
    job: str = ""
    late_names: bool = False
    agent_store: bool = False
    hosted: bool = False
    socket: str = ""
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
    # The variable that would give each missing value.
    wanted: dict[str, str] = msgspec.field(default_factory=dict)
    # This launcher starts the process itself, so nothing else is compared with it.
    innermost: bool = False
    # What to do if rank or world size is missing; "" for the default.
    remedy: str = ""

    def __repr__(self) -> str:
        """Leave the environment out: it holds secrets."""
        return f"Detection(source={self.source!r}, reason={self.reason!r}, reasons={self.reasons!r})"

    def read(self, **variables: str | tuple[str, ...]) -> Detection:
        """Read each value (rank, world_size …) from its variable, or from the first of several that is set."""
        for value, variable in variables.items():
            names = (variable,) if isinstance(variable, str) else variable
            self.wanted[value] = names[0]
            for name in names:
                number = integer(self.env, name)
                if number is not None:
                    self.set(f"{name}={number}", **{value: number})
                    break
        return self

    def set(self, why: str, **values: object) -> Detection:
        """Set values and the place where they were read."""
        for name, value in values.items():
            setattr(self, name, value)
            self.reasons[name] = why
        return self

    def locate(self, host: _Host | None = None, number: int | None = None, why: str = "") -> Detection:
        """Set the coordinator's address; MASTER_ADDR and MASTER_PORT have precedence.

        ``host`` returns the environment's host; ``number`` is its port and ``why`` where that was read.
        Without a port, one is derived from the job's name.
        """
        name, where = text(self.env, "MASTER_ADDR"), "MASTER_ADDR"
        # Every rank is known to be on this host.
        one_host = self.world_size is not None and self.world_size in {1, self.local_world_size}
        if not name and one_host:
            self.reasons["coordinator"] = "none needed: every rank is on this host"
            return self
        if not name and host is not None:
            name, where = host()
        given = integer(self.env, "MASTER_PORT")
        if given is not None:
            number, why = port(given, f"MASTER_PORT={given}"), f"MASTER_PORT={given}"
        elif number is None and name and self.job:
            number = _FIRST_DERIVED + zlib.crc32(self.job.encode()) % _DERIVED
            why = f"derived from the job's name {self.job}"
        if name and number is not None:
            return self.set(f"host: {where}; port: {why}", coordinator=Address(name, number))
        if name and where != "MASTER_ADDR":
            # Incomplete, but ranks may also meet at a file or a store.
            self.reasons["coordinator"] = f"{self.source} gives a host ({name}) but no port; set MASTER_PORT"
            return self
        if name:
            raise self._half(f"{where}={name}", "MASTER_PORT", "set MASTER_PORT to a free port of rank 0's host")
        if given is not None:
            raise self._half(why, "MASTER_ADDR", "set MASTER_ADDR to the host of rank 0")
        self.reasons.setdefault("coordinator", f"{self.source} gives no address; set MASTER_ADDR and MASTER_PORT")
        return self

    def world(self) -> World:
        """Return the finished world; raises where rank or size is missing or they do not fit together."""
        rank, size = self.rank, self.world_size
        if rank is None or size is None:
            there = join([self.reasons[key] for key in ("rank", "world_size") if key in self.reasons])
            words = (("rank", "the rank", rank), ("world_size", "the world size", size))
            gone = join([self.wanted.get(key, word) for key, word, value in words if value is None])
            raise self._half(there, gone, self.remedy or f"set {gone} as well, or pass rank= and world_size=")
        self._range("rank", rank, size, "world_size")
        local, here = self.local_rank, self.local_world_size
        if here is not None:
            if here > size:
                raise fail(
                    "launcher-mismatch",
                    f"{here} ranks on this node, but only {size} in all",
                    who=me(),
                    why=f"{self.reasons.get('local_world_size', here)} against {self.reasons.get('world_size', size)}",
                    fix="unset the one that is left over from another launch",
                )
            if local is not None:
                self._range("local_rank", local, here, "local_world_size")
        if self.late_names:
            self.reasons["late_names"] = f"in {self.source}, host names may appear only after a while"
        return World(**{name: getattr(self, name) for name in World._fields})

    def _half(self, there: str, gone: str, fix: str) -> AllhandsError:
        return fail(
            "incomplete-environment",
            f"{gone} {'are' if ' and ' in gone else 'is'} missing" + (f": only {there} is there" if there else ""),
            who=me(),
            why=f"{self.reason}; a process needs its rank, the world size and, on several hosts, an address and a port",
            fix=fix,
        )

    def _range(self, what: str, number: int, size: int, of: str) -> None:
        if 0 <= number < size:
            return
        word, words = what.replace("_", " "), of.replace("_", " ")
        said = f"{self.reasons.get(what, number)}, {self.reasons.get(of, size)}"
        fix = "give a world size of at least 1"
        if size > 0:
            fix = f"ranks count from 0: give a {word} between 0 and {size - 1}, or a larger {words}"
        raise fail(
            "rank-out-of-range",
            f"{word} {number} does not exist with a {words} of {size}",
            who=me(),
            why=f"{self.source} says {said}",
            fix=fix,
            ranks=(number,) if what == "rank" and number >= 0 else (),
        )


def parse_address(written: str, where: str) -> Address:
    """Return the address that is ``written`` as HOST:PORT; ``where`` names its origin in errors."""
    host, colon, number = written.removeprefix("tcp://").strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    # An IPv6 address without brackets is ambiguous: its last group looks like a port.
    if not colon or not host or (":" in host and not bracketed) or not (number.isascii() and number.isdecimal()):
        raise fail(
            "invalid-argument",
            f"{where} is not an address",
            who=me(),
            why="an address is HOST:PORT, with an IPv6 address in brackets: [fe80::1]:29500",
            fix="give the host and the port of rank 0",
        )
    return Address(host, port(int(number), where))


# Set by platforms and manifests to state how many processes a node shall have; none of them starts any.
_PER_NODE = ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "PET_NPROC_PER_NODE")


def processes_per_node(env: _Env) -> str:
    """Return the variable that asks for more than one process per node, as NAME=VALUE, or ""."""
    values = ((name, text(env, name)) for name in _PER_NODE)
    return next((f"{name}={value}" for name, value in values if value.isdecimal() and int(value) > 1), "")


def check_one_process(env: _Env, counted: str, where: str, evidence: str = "") -> None:
    """Raise node-not-process if ``counted`` (RANK=1) numbers nodes, and a variable asks for more processes per node.

    ``where`` is the reason why it numbers nodes, ``evidence`` replaces that variable.
    """
    evidence = evidence or processes_per_node(env)
    if evidence:
        raise fail(
            "node-not-process",
            f"{counted} counts nodes, but several processes per node are meant",
            who=me(),
            why=f"{where}; {evidence}. All processes of a node would claim the same rank",
            fix="start the script on every node through a launcher that numbers the processes (torchrun, or "
            "allhands' own)\nor pass rank= and world_size=, or ask for one process per node",
        )
