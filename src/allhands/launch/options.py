"""The options of `allhands run` as one table, the job that a command line describes, and torchrun's spellings.

Both readers of a command line are derived from the table: `read_plain` here, and click's command in `command`. Imports
nothing slow: workers start before anything slow is imported.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from ..environments.world import Address

# Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = ["CAUSES", "OPTIONS", "Job", "Option", "Streams", "UsageError", "make_job", "read_plain"]

# The values of --restart-if: the causes of a verdict, and "any" for all of them.
CAUSES = ("any", "exception", "exit", "signal", "oom", "lost", "hang")

# torch's own default port, which torchrun uses where only an address is given.
_DEFAULT_PORT = 29500


class Streams(NamedTuple):
    """Destinations of a rank's output, as torchrun's bits: 1 is stdout, 2 is stderr."""

    redirected: int = 0
    teed: int = 0


class Job(NamedTuple):
    """The processes to start on this node, and how."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    name: str = ""
    local_world_size: int = 1
    nodes: int = 1
    # -1 until the agents have met: the one that can bind the coordinator's address is 0, others in order of arrival.
    node_rank: int = 0
    # Ranks per node, once the agents have met; () while every node is assumed to have as many as this one.
    layout: tuple[int, ...] = ()
    coordinator: Address | None = None
    master: Address | None = None
    role: str = "default"
    init: bool = False
    max_restarts: int = 0
    restart_if: frozenset[str] = frozenset({"any"})
    timeout_s: float = 600.0
    grace_s: float = 10.0
    hang_timeout_s: float = 0.0
    prefix: bool = True
    fold: bool = False
    log_dir: str = ""
    streams: tuple[Streams, ...] = ()
    shown: frozenset[int] | None = None
    report: str = ""

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(self.layout) or self.nodes * self.local_world_size

    def rank(self, local_rank: int) -> int:
        """Return the rank of this node's worker ``local_rank``."""
        before = sum(self.layout[: self.node_rank]) if self.layout else self.node_rank * self.local_world_size
        return before + local_rank

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """Return the ranks of ``node``; () before the agents have met."""
        first = sum(self.layout[:node])
        return tuple(range(first, first + self.layout[node])) if self.layout else ()


class UsageError(ValueError):
    """A command line that cannot be run, and why."""


class Option(NamedTuple):
    """One option. ``kind`` is the type of its value; bool for a flag."""

    name: str
    help: str
    default: Any = ""
    kind: type = str
    metavar: str | None = None
    short: str = ""
    show_default: bool = False

    @property
    def key(self) -> str:
        """Its key among the values that were given."""
        return self.name[2:].replace("-", "_")


OPTIONS = (
    Option("--nproc-per-node", "Ranks on this node.", "1", metavar="N|cpu|gpu|auto", short="-n", show_default=True),
    Option("--nnodes", "Number of nodes (M, or torchrun's M:M).", "1", metavar="M", show_default=True),
    Option("--node-rank", "Rank of this node; by default in order of arrival.", None, int, "R"),
    Option("--coordinator", "Address of node 0's agent, for several nodes.", metavar="HOST:PORT"),
    Option("--timeout", "Time that nodes wait for each other (600).", None, float, "S"),
    Option("--init", "Form the group before the script starts, and destroy it afterwards.", False, bool),
    Option("--module", "SCRIPT is a module, as for python -m.", False, bool, short="-m"),
    Option("--no-python", "SCRIPT is an executable, not Python.", False, bool),
    Option("--hang-timeout", "End a job whose collectives make no progress for S seconds.", 0.0, float, "S"),
    Option("--grace", "Time from SIGTERM to SIGKILL.", 10.0, float, "S", show_default=True),
    Option("--max-restarts", "Restart all ranks up to K times.", 0, int, "K", show_default=True),
    Option("--restart-if", f"Of {', '.join(CAUSES)}.", "any", metavar="CAUSES", show_default=True),
    Option("--report", "Write the verdict as JSON, also for a job that succeeded.", metavar="FILE"),
    Option("--no-prefix", "Do not prefix each line with its rank.", False, bool),
    Option("--fold", "Print a line that several ranks print once, with their ranks.", False, bool),
    Option("--log-dir", "Write each rank's output to files under DIR.", metavar="DIR"),
    Option("--redirects", "To files only: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,...", "0", short="-r"),
    Option("--tee", "To files too; same values as --redirects.", "0", short="-t"),
    Option("--local-ranks-filter", "Show the output of these local ranks only: 0,2.", metavar="RANKS"),
    Option("--rdzv-id", "The job's name.", "none"),
    Option("--rdzv-endpoint", "As --coordinator.", metavar="HOST:PORT"),
    Option("--rdzv-backend", "static or c10d; both use allhands' own roll call.", "static"),
    Option("--rdzv-conf", "torchrun's; join_timeout= and timeout= are as --timeout."),
    Option("--standalone", "One node; the default without --nnodes.", False, bool),
    Option("--master-addr", "MASTER_ADDR for the script; also --coordinator where that is not given."),
    Option("--master-port", "MASTER_PORT for the script; a free port by default.", None, int),
    Option("--role", "ROLE_NAME for the script.", "default"),
    Option("--monitor-interval", "Ignored (torchrun's); exits are seen at once.", 0.1, float),
    Option("--start-method", "Ignored (torchrun's); workers are new interpreters.", "spawn"),
)


def read_plain(
    line: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, tuple[str, ...], dict[str, Any]] | None:
    """Return the script, its arguments and the values of all options; None where only click can read ``line``.

    click reads every line and reports mistakes, but its import takes as long as everything else before the workers.
    """
    if any(name.startswith("PET_") for name in environment):
        return None
    known = {option.name: option for option in OPTIONS} | {option.short: option for option in OPTIONS if option.short}
    given: dict[str, Any] = {option.key: option.default for option in OPTIONS}
    words = list(line)
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        # --like_this is torchrun's older spelling of --like-this.
        option = known.get(name.replace("_", "-"))
        # click does not read -n=2.
        if option is None or (equals and (option.kind is bool or not name.startswith("--"))):
            return None
        if option.kind is bool:
            given[option.key] = True
            continue
        if not equals:
            if not words:
                return None
            value = words.pop(0)
        try:
            given[option.key] = option.kind(value)
        except ValueError:
            return None
    if not words:
        return None
    return words[0], tuple(words[1:]), given


def make_job(script: str, arguments: tuple[str, ...], given: dict[str, Any]) -> Job:
    """Return the job that the options describe; raise UsageError where they contradict each other."""
    nodes = _nodes(given["nnodes"])
    local = _local_world_size(given["nproc_per_node"])
    coordinator, master = _addresses(given, nodes)
    if given["rdzv_backend"] not in {"static", "c10d"}:
        raise _wrong("rdzv_backend", f"{given['rdzv_backend']!r} is not known; allhands uses its own roll call")
    causes = frozenset(part.strip() for part in given["restart_if"].split(",") if part.strip())
    if not causes <= set(CAUSES):
        raise _wrong("restart_if", f"{', '.join(sorted(causes - set(CAUSES)))!r} is none of {', '.join(CAUSES)}")
    for name in ("max_restarts", "grace", "hang_timeout"):
        if given[name] < 0:
            raise _wrong(name, f"{given[name]} is less than 0")
    kind: Literal["script", "module", "program"]
    kind = "module" if given["module"] else "program" if given["no_python"] else "script"
    if given["init"] and kind == "program":
        raise _wrong("init", "a program that is not Python has no group to form; leave --no-python out")
    node_rank = given["node_rank"]
    if node_rank is None:
        node_rank = 0 if nodes == 1 else -1
    elif not 0 <= node_rank < nodes:
        raise _wrong("node_rank", f"{node_rank} is not between 0 and {nodes - 1}")
    return Job(
        target=_checked_target(script, kind),
        arguments=arguments,
        kind=kind,
        name=_name(given, nodes),
        local_world_size=local,
        nodes=nodes,
        node_rank=node_rank,
        coordinator=coordinator,
        master=master,
        role=given["role"],
        init=given["init"],
        max_restarts=given["max_restarts"],
        restart_if=causes,
        timeout_s=_timeout(given),
        grace_s=given["grace"],
        hang_timeout_s=given["hang_timeout"],
        prefix=not given["no_prefix"],
        fold=given["fold"],
        log_dir=given["log_dir"],
        streams=_streams(given, local),
        shown=_shown(given["local_ranks_filter"], local),
        report=given["report"],
    )


def _wrong(option: str, why: str) -> UsageError:
    return UsageError(f"--{option.replace('_', '-')}: {why}")


def _name(given: dict[str, Any], nodes: int) -> str:
    """Return the job's name: torchrun's id where one was given, else one that is unique on this host."""
    if given["rdzv_id"] not in {"", "none"}:
        return str(given["rdzv_id"])
    # All nodes must use the same name, before they have met.
    return f"run-{os.urandom(4).hex()}" if nodes == 1 else "run"


def _timeout(given: dict[str, Any]) -> float:
    """Return how long nodes wait for each other: --timeout, or what torchrun reads in --rdzv-conf."""
    seconds = given["timeout"]
    if seconds is None:
        conf = dict(part.strip().partition("=")[::2] for part in given["rdzv_conf"].split(",") if "=" in part)
        text = conf.get("join_timeout") or conf.get("timeout") or "600"
        try:
            seconds = float(text)
        except ValueError:
            raise _wrong("rdzv_conf", f"{text!r} is not a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise _wrong("timeout", f"{seconds} is not a number of seconds above 0")
    return float(seconds)


def _nodes(text: str) -> int:
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise _wrong("nnodes", f"{text!r} is not a number of nodes")
    if colon and least != most:
        raise _wrong("nnodes", f"{text!r}: a job has a fixed number of nodes here; give {most} or {most}:{most}")
    if int(least) < 1:
        raise _wrong("nnodes", "a job has at least 1 node")
    return int(least)


def _local_world_size(text: str) -> int:
    cores, gpus = len(os.sched_getaffinity(0)), _gpus()
    match text:
        case "cpu":
            return cores
        case "gpu" if gpus == 0:
            raise _wrong("nproc_per_node", "no GPU is visible here; give a number, or cpu")
        case "gpu":
            return gpus
        case "auto":
            return gpus or cores
    try:
        number = int(text)
    except ValueError:
        raise _wrong("nproc_per_node", f"{text!r} is neither a number nor one of cpu, gpu, auto") from None
    if number < 1:
        raise _wrong("nproc_per_node", f"{number} ranks are too few; a job has at least 1")
    return number


def _gpus() -> int:
    """Count the GPUs that a process started now would see, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    return len(
        [entry for entry in os.scandir("/dev") if entry.name.startswith("nvidia") and entry.name[6:].isdecimal()]
    )


def _addresses(given: dict[str, Any], nodes: int) -> tuple[Address | None, Address | None]:
    """Return the agents' coordinator (None for one node), and MASTER_ADDR and MASTER_PORT (None for a free port)."""
    host, port = given["master_addr"].strip("[]"), given["master_port"]
    if port is not None and not 0 < port < 65536:
        raise _wrong("master_port", f"{port} is not a port")
    master = Address(host or "127.0.0.1", port) if port is not None else None
    if nodes == 1:
        return None, master
    place = given["coordinator"] or given["rdzv_endpoint"]
    if not place and host:
        # torchrun's static form: the agents meet here, and torch's own store uses another port.
        place = f"{given['master_addr']}:{port or _DEFAULT_PORT}"
        master = None
    if not place or given["standalone"]:
        raise _wrong("nnodes", f"{nodes} nodes need --coordinator HOST:PORT, an address of node 0, on each of them")
    # Imports every environment; one node does not need it.
    from ..environments.base import parse_address
    from ..errors import AllhandsError

    try:
        address = parse_address(place if "://" in place else f"tcp://{place}", f"--coordinator {place}")
    except AllhandsError as problem:
        raise UsageError(f"{problem.diagnosis.what}: {problem.diagnosis.why}") from problem
    return address, master


def _streams(given: dict[str, Any], local: int) -> tuple[Streams, ...]:
    redirected = _bits("redirects", given["redirects"], local)
    teed = _bits("tee", given["tee"], local)
    if given["log_dir"] and not any((*redirected, *teed)):
        # --log-dir alone keeps both streams.
        teed = [3] * local
    return tuple(Streams(first, second) for first, second in zip(redirected, teed, strict=True))


def _bits(option: str, text: str, local: int) -> list[int]:
    if text in {"0", "1", "2", "3"}:
        return [int(text)] * local
    found = [0] * local
    for part in text.split(","):
        rank, _, number = part.strip().partition(":")
        if not rank.isdecimal() or number not in {"0", "1", "2", "3"}:
            raise _wrong(option, f"{text!r} is neither 0, 1, 2 or 3 nor a list such as 0:1,1:3")
        if int(rank) >= local:
            raise _wrong(option, f"there is no local rank {rank} of {local}")
        found[int(rank)] = int(number)
    return found


def _shown(text: str, local: int) -> frozenset[int] | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < local for part in parts):
        raise _wrong("local_ranks_filter", f"{text!r} is not a list of local ranks below {local}")
    return frozenset(map(int, parts))


def _checked_target(target: str, kind: str) -> str:
    """Return ``target``; raise UsageError here, once, where every rank would fail to start it."""
    if kind == "script":
        if not os.path.exists(target):  # noqa: PTH110  # pathlib is slow to import
            near = _near(target)
            raise UsageError(f"there is no script {target!r}." + (f" Did you mean {near!r}?" if near else ""))
        if not os.access(target, os.R_OK):
            raise UsageError(f"the script {target!r} cannot be read.")
    if kind == "program":
        import shutil

        if shutil.which(target) is None:
            why = "is not executable" if os.path.exists(target) else "was not found"  # noqa: PTH110
            raise UsageError(f"the program {target!r} {why}.")
    return target


def _near(target: str) -> str:
    from difflib import get_close_matches
    from pathlib import Path

    path = Path(target)
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return str(path.with_name(near[0])) if near else ""
