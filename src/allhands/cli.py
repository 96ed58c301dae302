"""The command line. A command only parses its options; its work and its messages are in another module.

Starts without torch, whose import takes seconds; a command imports what it needs when it runs.
Exit status: 0, 1 for a failure (its diagnosis is printed on standard error), 2 for a usage error.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ._version import __version__
from .bench.operations import OPERATIONS

if TYPE_CHECKING:
    from .errors import AllhandsError

__all__ = ["failed", "main"]

# Wider paragraphs are hard to read, however wide the terminal is.
_WIDEST = 100

# The order in which `allhands --help` shows the commands. A command of no group is shown last.
_GROUPS = {
    "Start": ("run",),
    "Find out": ("doctor", "engines", "whoami", "explain"),
    "Measure": ("bench",),
    "Reference": ("help",),
}


class _Commands(click.Group):
    """A group that answers an unknown command with "Did you mean", and a failure with its diagnosis."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from difflib import get_close_matches

            # Older versions of click make no suggestion; this is the same sentence with each of them.
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"there is no command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # Here and not around `main`, so that it holds for the script, for -m and in tests.
        from .errors import AllhandsError

        try:
            return super().invoke(ctx)
        except AllhandsError as problem:
            ctx.exit(failed(problem))


def failed(problem: AllhandsError) -> int:
    """Print the diagnosis of a failure on standard error; return the exit status."""
    from .diagnosis import title
    from .errors import ArgumentError

    click.echo(problem.diagnosis.render(title(problem.slug)), err=True)
    return 2 if isinstance(problem, ArgumentError) else 1


class _Program(_Commands):
    """The top of the command line; its help shows the commands in groups."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        grouped = {name for names in _GROUPS.values() for name in names}
        rest = tuple(name for name in self.list_commands(ctx) if name not in grouped)
        width = max(map(len, self.commands))
        for heading, names in {**_GROUPS, "Other": rest}.items():
            lines = [(f"{name:{width}}", self.commands[name].get_short_help_str(limit=200)) for name in names]
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's signature
        formatter.write_paragraph()
        formatter.write_text("`allhands help environment` lists the environment variables.")
        formatter.write_text("Exit status: 0 success, 1 failure, 2 usage error.")


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="allhands", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Process groups for PyTorch that start in seconds or say why they cannot, and always clean up."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class _Lazy(click.Command):
    """A command whose options are declared in the module that implements it, which is imported on use."""

    def __init__(self, name: str, module: str, **kw: Any) -> None:
        super().__init__(name, **kw)
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        from importlib import import_module

        command: click.Command = import_module(self._module, __package__).command
        return command.make_context(info_name, args, parent=parent, **extra)


main.add_command(
    _Lazy(
        "run",
        ".launch.command",
        help="Start a script once per rank, show their output, and say who is to blame if they die.",
    )
)
main.add_command(_Lazy("doctor", ".doctor.command", help="Find out why a job stalls, or would, and how to fix it."))


@main.command("engines")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def _engines(as_json: bool) -> None:
    """List the engines that can run here, and what to install for the others.

    An engine moves tensors: shared memory, Gloo, TCP between hosts, NCCL, memory of a GPU, MPI. Opens no connection and
    does not import torch. Always exits with 0.
    """
    from .doctor.engines import render, report

    found = report()
    click.echo(json.dumps(found, indent=2) if as_json else render(found))


@main.command("whoami")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def _whoami(ctx: click.Context, as_json: bool) -> None:
    """Show the rank, job and coordinator that this process would have, and why.

    Run it where the script would run: under srun, mpirun or torchrun, or in the pod. Opens no connection. Exits with 1
    if they cannot be determined; the report then begins with the reason.
    """
    from .environments.whoami import render, report

    found = report()
    click.echo(json.dumps(found, indent=2) if as_json else render(found))
    ctx.exit(found["exit_code"])


@main.command("help")
@click.argument("topic", required=False, metavar="[environment|COMMAND]")
@click.pass_context
def _help(ctx: click.Context, topic: str | None) -> None:
    """List the environment variables, or print the help of a command.

    `allhands help environment` lists the variables; `allhands help COMMAND` is `allhands COMMAND --help`.
    """
    above = ctx.find_root()
    if topic is None:
        click.echo(above.get_help())
    elif topic == "environment":
        from .settings import LAUNCHER_TABLE, TABLE

        formatter = above.make_formatter()
        # The column fits the longest name; click would print longer ones on lines of their own.
        column = max(map(len, TABLE | LAUNCHER_TABLE)) + 2
        for heading, table in (("Environment variables", TABLE), ("Set by the launcher only", LAUNCHER_TABLE)):
            with formatter.section(heading):
                formatter.write_dl(list(table.items()), col_max=column)
        click.echo(formatter.getvalue(), nl=False)
    else:
        _, command, _ = main.resolve_command(above, [topic])
        if command is not None:
            command.main(["--help"], prog_name=f"{above.info_name} {topic}")


@main.command("explain")
@click.argument("slug", required=False, metavar="[NAME]")
def _explain(slug: str | None) -> None:
    """Print the page on a diagnosis, or the list of all.

    NAME is the slug in brackets at the end of an error's first line: missing-ranks, peer-failed, ...
    """
    from .diagnosis.explain import render

    # A name that is copied from a message has the brackets.
    text = render(slug.strip("[]") if slug is not None else None)
    if slug is None or not _is_terminal():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text), width=min(console.width, _WIDEST))


def _is_terminal() -> bool:
    return sys.stdout.isatty()


@main.group("bench", cls=_Commands, context_settings={"show_default": True})
def _bench() -> None:
    """Measure launches, roll calls, collectives and training on this machine."""


def _numbers(text: str) -> list[int]:
    """Read comma-separated whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 64,256.") from None


@_bench.command("rollcall")
@click.option(
    "--members", type=_numbers, metavar="NUMBERS", default="64,256,1024,4096", help="Numbers of members, in turn."
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Measurements of each.")
@click.option("--transport", type=click.Choice(["tcp", "unix"]), default="tcp")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def _rollcall(members: list[int], rounds: int, transport: str, as_json: bool) -> None:
    """Measure the roll call as jobs grow.

    The coordinator is real and has its own process; the members are simulated, over real sockets.
    """
    from .bench import rollcall
    from .bench.tables import rollcall_table

    rows = rollcall.run(members, rounds, transport=transport)  # type: ignore[arg-type]  # one of click's choices
    click.echo(json.dumps(rows, indent=2) if as_json else rollcall_table(rows))


@_bench.command("launch")
@click.option("--ranks", type=click.IntRange(1, 256), default=4, help="Number of processes.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Measurements of each.")
@click.option("--json", "as_json", is_flag=True, help="Print every launch as JSON.")
def _launch(ranks: int, rounds: int, as_json: bool) -> None:
    """Measure a launch against torchrun.

    The time from the command until every rank has finished its first all_reduce, and the part of it that imports torch.
    """
    from .bench.launch import measure, table

    found = measure(ranks, rounds)
    click.echo(json.dumps(found, indent=2) if as_json else table(found))


@_bench.command("ddp")
@click.option("--ranks", type=_numbers, metavar="NUMBERS", default="2,4", help="Numbers of processes, in turn.")
@click.option("--models", default="mlp,cnn,transformer,transformer-16", help="Models to train.")
@click.option("--rounds", type=click.IntRange(min=1), default=60, help="Measurements of each.")
@click.option("--no-memory", is_flag=True, help="Do not measure memory, which takes processes of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def _ddp(ranks: list[int], models: str, rounds: int, no_memory: bool, as_json: bool) -> None:
    """Measure training steps of DistributedDataParallel.

    Compares our class on our backend, torch's class on ours, and torch's class on Gloo, in turn in the same processes,
    with a step without any of them.
    """
    from .bench.config import ddp_config
    from .bench.tables import ddp_table
    from .bench.training import measure

    rows = [each for number in ranks for each in measure(ddp_config(number, models, rounds), with_memory=not no_memory)]
    click.echo(json.dumps(rows, indent=2) if as_json else ddp_table(rows))


def _collective(operation: str) -> None:
    """Add ``allhands bench OPERATION``."""

    @_bench.command(
        operation,
        help=f"Measure {operation} on this host.\n\nThe engines run in the same processes, in turn. Prints median, "
        "least, bus bandwidth and ratio for each size, with a legend. MPI needs mpirun and mpi4py.",
        short_help=f"Measure {operation} on this host.",
    )
    @click.option("--ranks", type=click.IntRange(2, 256), default=2, help="Number of processes.")
    @click.option("--sizes", default="4:64M", help="Bytes: a range (each 4 times the last) or a list.")
    @click.option("--hosts", type=click.IntRange(1, 64), default=1, help="Network namespaces to distribute them over.")
    @click.option("--against", default="gloo", help="Peers: gloo, mpi, both with a comma, or none.")
    @click.option(
        "--engine",
        type=click.Choice(["shm", "gloo", "mpi"]),
        default="shm",
        help="The engine of ours that is measured.",
    )
    @click.option("--rounds", type=click.IntRange(min=1), default=5, help="Measurements of each.")
    @click.option("--floor", is_flag=True, help="Measure plain copies too, and print the ratio to them.")
    @click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        help="Device of the tensors; with cuda, all ranks share the first GPU.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
    @click.option("--plot", metavar="FILE", help="Plot time and bandwidth into FILE (.png, .svg, .pdf).")
    def run(*, sizes: str, as_json: bool, plot: str | None, **asked_for: Any) -> None:
        from .bench.collective import measure, progress_bar
        from .bench.config import collective_config
        from .bench.tables import collective_table

        config = collective_config(operation, sizes_text=sizes, plot=plot, **asked_for)
        with progress_bar(config) as notify:
            rows = measure(config, notify)
        click.echo(json.dumps(rows, indent=2) if as_json else collective_table(config, rows))
        if plot:
            from .bench.tables import plot as draw

            draw(config, rows, plot)


for _name in OPERATIONS:
    _collective(_name)
