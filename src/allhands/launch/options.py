"""The command line of `allhands run`. torchrun's spellings and PET_ variables mean what they mean there."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from ..world import Address
from .job import CAUSES, Job, Streams

__all__ = ["command"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# torch's own default port, which torchrun takes where only an address is given.
_DEFAULT_PORT = 29500


class _Command(click.Command):
    """A command whose first word that is no option is the script: all after it is the script's."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        # --like_this is torchrun's older spelling of --like-this.
        kw["context_settings"] = {"allow_interspersed_args": False, "token_normalize_func": _dashed}
        super().__init__(*args, **kw)


def _dashed(word: str) -> str:
    return word.replace("_", "-")


def _option(name: str, **kw: Any) -> Callable[[_Function], _Function]:
    """Declare an option with torchrun's PET_ variable."""
    short, destination = kw.pop("short", None), name[2:].replace("-", "_")
    return click.option(*([short] if short else []), name, destination, envvar=f"PET_{destination.upper()}", **kw)


@click.command("run", cls=_Command)
@_option("--nproc-per-node", short="-n", default="1", show_default=True, metavar="N|cpu|gpu|auto", help="Ranks here.")
@_option("--nnodes", default="1", show_default=True, metavar="M", help="Nodes in all (M, or torchrun's M:M).")
@_option("--node-rank", type=int, default=None, metavar="R", help="Which node this is, from 0; else as they come.")
@_option("--coordinator", default="", metavar="HOST:PORT", help="Where node 0's agent listens, for several nodes.")
@_option("--timeout", type=float, default=None, metavar="S", help="How long nodes wait for each other (600).")
@_option("--init", is_flag=True, help="Form the group before the script starts, and end it afterwards.")
@_option("--module", short="-m", is_flag=True, help="SCRIPT is a module, as for python -m.")
@_option("--no-python", is_flag=True, help="SCRIPT is a program of its own, not Python.")
@_option(
    "--hang-timeout", type=float, default=0.0, metavar="S", help="End a job whose collectives stand still so long."
)
@_option("--grace", type=float, default=10.0, show_default=True, metavar="S", help="Time to end before SIGKILL.")
@_option("--max-restarts", type=int, default=0, show_default=True, metavar="K", help="Start all ranks again, K times.")
@_option("--restart-if", default="any", show_default=True, metavar="CAUSES", help=f"Of {', '.join(CAUSES)}.")
@_option("--report", default="", metavar="FILE", help="Write the verdict as JSON, also of a job that went well.")
@_option("--no-prefix", is_flag=True, help="Do not begin each line with its rank.")
@_option("--fold", is_flag=True, help="Show a line that several ranks print once, with their ranks.")
@_option("--log-dir", default="", metavar="DIR", help="Keep each rank's output in files under DIR.")
@_option(
    "--redirects", short="-r", default="0", help="To files only: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,..."
)
@_option("--tee", short="-t", default="0", help="To files too; written as --redirects.")
@_option("--local-ranks-filter", default="", metavar="RANKS", help="Show only these ranks of this node: 0,2.")
@_option("--rdzv-id", default="none", help="The job's name.")
@_option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="As --coordinator.")
@_option("--rdzv-backend", default="static", help="static or c10d; both are allhands' own roll call.")
@_option("--rdzv-conf", default="", help="Of torchrun's, join_timeout= and timeout= are as --timeout.")
@_option("--standalone", is_flag=True, help="One node; what allhands does without --nnodes.")
@_option("--master-addr", default="", help="MASTER_ADDR for the script; --coordinator where that is not given.")
@_option("--master-port", type=int, default=None, help="MASTER_PORT for the script; a free port by default.")
@_option("--role", default="default", help="ROLE_NAME for the script.")
@_option("--monitor-interval", type=float, default=0.1, help="Accepted from torchrun; ends are seen at once.")
@_option("--start-method", default="spawn", help="Accepted from torchrun; workers are new interpreters.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Start SCRIPT once per rank, show their output, and say who is to blame if they die.

    Takes torchrun's options. Ctrl-C ends every process of the job; SIGUSR1 shows what each rank is doing. The exit
    status is that of the rank to blame (128 + signal), 124 after a hang, 2 for a command that makes no sense.
    """
    # The terminal's click makes the usage error; the agent brings asyncio and the control plane along.
    job = _job(script, arguments, given)
    from .agent import main

    ctx.exit(main(job))


def _job(script: str, arguments: tuple[str, ...], given: dict[str, Any]) -> Job:
    nodes = _nodes(given["nnodes"])
    local = _local_world_size(given["nproc_per_node"])
    coordinator, master = _addresses(given, nodes)
    if given["rdzv_backend"] not in {"static", "c10d"}:
        raise _wrong("rdzv_backend", f"{given['rdzv_backend']!r} is not known; allhands holds its own roll call")
    causes = frozenset(part.strip() for part in given["restart_if"].split(",") if part.strip())
    if not causes <= set(CAUSES):
        raise _wrong("restart_if", f"{', '.join(sorted(causes - set(CAUSES)))!r} is none of {', '.join(CAUSES)}")
    for name in ("max_restarts", "grace", "hang_timeout"):
        if given[name] < 0:
            raise _wrong(name, f"{given[name]} is less than 0")
    kind: Literal["script", "module", "program"] = "script"
    if given["module"]:
        kind = "module"
    elif given["no_python"]:
        kind = "program"
    if given["init"] and kind == "program":
        raise _wrong("init", "a program that is not Python has no group to form; leave --no-python out")
    node_rank = given["node_rank"]
    if node_rank is None:
        node_rank = 0 if nodes == 1 else -1
    elif not 0 <= node_rank < nodes:
        raise _wrong("node_rank", f"{node_rank} is not between 0 and {nodes - 1}")
    return Job(
        target=_checked(script, kind),
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


def _wrong(option: str, why: str) -> click.UsageError:
    return click.UsageError(f"--{option.replace('_', '-')}: {why}")


def _name(given: dict[str, Any], nodes: int) -> str:
    """Return the job's name: torchrun's id where one was given, else one that no other job on this host has."""
    if given["rdzv_id"] not in {"", "none"}:
        return str(given["rdzv_id"])
    # All nodes must say the same name, and know nothing of each other yet.
    return f"run-{secrets.token_hex(4)}" if nodes == 1 else "run"


def _timeout(given: dict[str, Any]) -> float:
    """Return how long nodes wait for each other: torchrun's join_timeout by default."""
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
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _addresses(given: dict[str, Any], nodes: int) -> tuple[Address | None, Address | None]:
    """Return where the coordinator listens (None: on this host's socket), and what MASTER_ADDR and PORT are to say."""
    host, port = given["master_addr"].strip("[]"), given["master_port"]
    if port is not None and not 0 < port < 65536:
        raise _wrong("master_port", f"{port} is not a port")
    master = Address(host or "127.0.0.1", port) if port is not None else None
    if nodes == 1:
        return None, master
    place = given["coordinator"] or given["rdzv_endpoint"]
    if not place and host:
        # torchrun's static form: this is where the agents meet, and torch's own store gets a port of its own.
        place = f"{given['master_addr']}:{port or _DEFAULT_PORT}"
        master = None
    if not place or given["standalone"]:
        raise _wrong("nnodes", f"{nodes} nodes need --coordinator HOST:PORT, an address of node 0, on each of them")
    # All environments come with it; one node does not wait for them.
    from ..environments.address import parse
    from ..errors import AllhandsError

    try:
        address = parse(place if "://" in place else f"tcp://{place}", f"--coordinator {place}")
    except AllhandsError as problem:
        raise click.UsageError(f"{problem.diagnosis.what}: {problem.diagnosis.why}") from problem
    return address, master


def _streams(given: dict[str, Any], local: int) -> tuple[Streams, ...]:
    redirected = _bits("redirects", given["redirects"], local)
    teed = _bits("tee", given["tee"], local)
    if given["log_dir"] and not any((*redirected, *teed)):
        # Whoever names a folder for logs wants logs.
        teed = [3] * local
    return tuple(Streams(first, second) for first, second in zip(redirected, teed, strict=True))


def _bits(option: str, text: str, local: int) -> list[int]:
    if text in {"0", "1", "2", "3"}:
        return [int(text)] * local
    found = [0] * local
    for part in text.split(","):
        match = re.fullmatch(r"(\d+):([0-3])", part.strip())
        if match is None:
            raise _wrong(option, f"{text!r} is neither 0, 1, 2 or 3 nor a list such as 0:1,1:3")
        if int(match[1]) >= local:
            raise _wrong(option, f"there is no local rank {match[1]} of {local}")
        found[int(match[1])] = int(match[2])
    return found


def _shown(text: str, local: int) -> frozenset[int] | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < local for part in parts):
        raise _wrong("local_ranks_filter", f"{text!r} is not a list of local ranks below {local}")
    return frozenset(map(int, parts))


def _checked(target: str, kind: str) -> str:
    """Return what to start; a mistake in its name is said here, once, instead of by every rank."""
    if kind == "script":
        path = Path(target)
        if not path.exists():
            near = _near(path)
            raise click.UsageError(f"there is no script {target!r}." + (f" Did you mean {near!r}?" if near else ""))
        if not os.access(path, os.R_OK):
            raise click.UsageError(f"the script {target!r} cannot be read.")
    if kind == "program" and shutil.which(target) is None:
        why = "is not executable" if Path(target).exists() else "was not found"
        raise click.UsageError(f"the program {target!r} {why}.")
    return target


def _near(path: Path) -> str:
    from difflib import get_close_matches

    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return str(path.with_name(near[0])) if near else ""
