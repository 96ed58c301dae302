"""`allhands doctor`, as it is typed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from typing import Any

import click

from .. import settings
from ..environments.base import parse_address
from ..environments.world import Address
from .finding import Finding, exit_code
from .jobs import examine as examine_job
from .peer_protocol import Told
from .peer_server import Listener
from .remedy import apply
from .request import Case, open_case
from .run_checks import examine
from .screen import render, report

__all__ = ["command"]

# Where torch's jobs meet unless told otherwise, so the port that a firewall has most likely been opened for.
_PORT = 29500

# Wider lines are hard to read; narrower terminals are taken as they are.
_WIDEST = 120


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("target", required=False, metavar="[HOST:PORT]")
@click.option("--listen", is_flag=True, help="Wait here for `allhands doctor HOST:PORT` from other machines.")
@click.option("--once", is_flag=True, help="With --listen: answer one visitor, and exit as it found things.")
@click.option("--pid", type=click.IntRange(min=1), help="Look into the job of this process: a rank, or its launcher.")
@click.option(
    "--job",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[NAME]",
    help="Look into the job of that name, or all.",
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="How many ranks this machine is to have.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--fix", is_flag=True, help="Do what is safe and can be undone, and say what was done.")
@click.option("-v", "--verbose", is_flag=True, help="Show the evidence of what is green, too.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    target: str | None,
    listen: bool,
    once: bool,
    pid: int | None,
    job: str | None,
    ranks: int | None,
    as_json: bool,
    fix: bool,
    verbose: bool,
) -> None:
    """Say why a job stalls, or would: names, network, resources, software, environment.

    HOST:PORT is where the coordinator is or will be; without it, the environment's is taken (MASTER_ADDR and the like).
    With `allhands doctor --listen` on that machine, both directions, clocks and throughput are checked too. With --pid
    or --job it says who waits for whom in a job that runs on this machine, since when, and at which line. Nothing is
    changed without --fix. Exit status: 0, 1 where something is red, 2 for a command that makes no sense.
    """
    inside = pid is not None or job is not None
    if once and not listen:
        raise click.UsageError("--once belongs to --listen.")
    if inside and (target is not None or listen):
        raise click.UsageError("--pid and --job look into a job; HOST:PORT and --listen look at the network. Use one.")
    if pid is not None and job is not None:
        raise click.UsageError("--pid and --job each name a job. Use one.")
    address = _address(target, listen=listen) if target is not None else None
    if listen:
        ctx.exit(_listen(address, once=once, as_json=as_json))
    started = time.monotonic()
    if inside:
        case, found = None, examine_job(pid, job)
    else:
        case = open_case(address, ranks=ranks)
        found = examine(case)
    done = apply(found) if fix else {}
    seconds = time.monotonic() - started
    _show(case, found, done, seconds, as_json=as_json, verbose=verbose)
    ctx.exit(exit_code(found))


def _address(text: str, *, listen: bool) -> Address:
    """Read HOST:PORT; with --listen also only a port, for all addresses of this machine."""
    if listen and text.isdecimal():
        text = f"0.0.0.0:{text}"
    plain = text.removeprefix("tcp://")
    # What parse takes has a scheme; an IPv6 address in it has brackets.
    return parse_address(f"tcp://{plain}", f"HOST:PORT {text!r}")


def _show(
    case: Case | None, found: list[Finding], done: dict[str, str], seconds: float, *, as_json: bool, verbose: bool
) -> None:
    host, target = socket.gethostname(), str(case.target) if case is not None and case.target is not None else ""
    if as_json:
        click.echo(json.dumps(report(found, host=host, target=target, seconds=seconds, done=done), indent=2))
        return
    heading = f"allhands doctor on {host}" + (f", for {target}" if target else "")
    width = min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else 100
    click.echo(render(found, heading, width=width, colour=sys.stdout.isatty(), verbose=verbose, done=done))


# Listening ----------------------------------------------------------------------------------------------------


def _listen(address: Address | None, *, once: bool, as_json: bool) -> int:
    read = settings.read()
    place = address if address is not None else Address("0.0.0.0", _PORT)  # noqa: S104  # the user asked for all
    reds: list[bool] = []

    def heard(whom: str, told: Told | None) -> None:
        reds.append(told is None or told.red)
        if as_json:
            said: dict[str, Any] = {"visitor": whom, "lines": told.lines if told else [], "red": reds[-1]}
            click.echo(json.dumps(said))
        elif told is None:
            click.echo(f"{whom} came and went away in the middle of the check")
        else:
            click.echo("\n".join([f"{whom} came and found:", *told.lines]))

    listener = Listener(place, read.secret(), heard)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: listener.end())
        open_to = "" if read.secret() else ", open to anyone (set ALLHANDS_TOKEN on both machines to close it)"
        if not as_json:
            name = socket.gethostname() if place.host in {"0.0.0.0", "::"} else place.host  # noqa: S104  # compared
            click.echo(
                f"listening on {Address(place.host, listener.port)}{open_to}; on the other machine type "
                f"`allhands doctor {Address(name, listener.port)}`, here Ctrl-C to end",
                err=True,
            )
        listener.serve(once=once)
    finally:
        listener.close()
    return int(any(reds))
