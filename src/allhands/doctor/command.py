"""The command `allhands doctor`."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time

import click

from .. import settings
from ..environments.base import parse_address
from ..environments.world import Address
from .finding import exit_code, render, report
from .jobs import examine_job
from .peer import PeerServer, Report
from .request import make_request
from .resources import apply_fixes
from .run_checks import run_checks

__all__ = ["command"]


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("target", required=False, metavar="[HOST:PORT]")
@click.option("--listen", is_flag=True, help="Wait here for `allhands doctor HOST:PORT` from other machines.")
@click.option("--once", is_flag=True, help="With --listen: serve one client, and exit with its result.")
@click.option("--pid", type=click.IntRange(min=1), help="Check the job of this process: a rank, or its launcher.")
@click.option(
    "--job",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[NAME]",
    help="Check the job of that name, or all jobs.",
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="Number of ranks that this machine will have.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--fix", is_flag=True, help="Make the changes that are safe and can be undone, and report them.")
@click.option("-v", "--verbose", is_flag=True, help="Show the evidence of green findings, too.")
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
    """Find out why a job stalls, or would: names, network, resources, software, environment.

    HOST:PORT is where the coordinator is or will be; by default it is taken from the environment (MASTER_ADDR and the
    like). With `allhands doctor --listen` on that machine, both directions, clocks and throughput are checked too.
    --pid and --job report which ranks of a job on this machine wait for which, since when, and at which line. Nothing
    is changed without --fix. Exit status: 0, 1 if anything is red, 2 for a usage error.
    """
    of_job = pid is not None or job is not None
    if once and not listen:
        raise click.UsageError("--once belongs to --listen.")
    if of_job and (target is not None or listen):
        raise click.UsageError("--pid and --job check a job; HOST:PORT and --listen check the network. Use one.")
    if pid is not None and job is not None:
        raise click.UsageError("--pid and --job each name a job. Use one.")
    address = None
    if target is not None:
        # With --listen a port alone is for all addresses of this machine.
        text = f"0.0.0.0:{target}" if listen and target.isdecimal() else target
        address = parse_address(text, f"HOST:PORT {target!r}")
    if listen:
        ctx.exit(_listen(address, once=once, as_json=as_json))
    started, place = time.monotonic(), ""
    if of_job:
        found = examine_job(pid, job)
    else:
        request = make_request(address, ranks=ranks)
        place = str(request.target or "")
        found = run_checks(request)
    done = apply_fixes(found) if fix else {}
    host, seconds = socket.gethostname(), time.monotonic() - started
    if as_json:
        click.echo(json.dumps(report(found, host=host, target=place, seconds=seconds, done=done), indent=2))
    else:
        heading = f"allhands doctor on {host}" + (f", for {place}" if place else "")
        terminal = sys.stdout.isatty()
        # Wider lines are hard to read.
        width = min(shutil.get_terminal_size().columns, 120) if terminal else 100
        click.echo(render(found, heading, width=width, colour=terminal, verbose=verbose, done=done))
    ctx.exit(exit_code(found))


def _listen(address: Address | None, *, once: bool, as_json: bool) -> int:
    token = settings.read().secret()
    # The default port of torch's jobs, which a firewall is most likely to have open.
    place = address if address is not None else Address("0.0.0.0", 29500)  # noqa: S104  # the user's choice
    red: list[bool] = []

    def print_report(client: str, result: Report | None) -> None:
        red.append(result is None or result.red)
        if as_json:
            click.echo(json.dumps({"visitor": client, "lines": result.lines if result else [], "red": red[-1]}))
        elif result is None:
            click.echo(f"{client} disconnected in the middle of the check")
        else:
            click.echo("\n".join([f"{client} found:", *result.lines]))

    server = PeerServer(place, token, print_report)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        if not as_json:
            access = "" if token else ", open to anyone (set ALLHANDS_TOKEN on both machines to restrict it)"
            everywhere = {"0.0.0.0", "::"}  # noqa: S104  # as above
            name = socket.gethostname() if place.host in everywhere else place.host
            click.echo(
                f"listening on {Address(place.host, server.port)}{access}; on the other machine type "
                f"`allhands doctor {Address(name, server.port)}`, here Ctrl-C to end",
                err=True,
            )
        server.serve(once=once)
    finally:
        server.close()
    return int(any(red))
