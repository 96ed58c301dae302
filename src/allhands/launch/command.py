"""The command line of `allhands run` as click reads it: every spelling, help, and what is wrong with a line."""

from __future__ import annotations

from typing import Any

import click

from .options import OPTIONS, Option, Unusable, make

__all__ = ["command"]


class _Command(click.Command):
    """A command whose first word that is no option is the script: all after it is the script's."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        # --like_this is torchrun's older spelling of --like-this.
        kw["context_settings"] = {"allow_interspersed_args": False, "token_normalize_func": _dashed}
        super().__init__(*args, **kw)


def _dashed(word: str) -> str:
    return word.replace("_", "-")


@click.command("run", cls=_Command)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Start SCRIPT once per rank, show their output, and say who is to blame if they die.

    Takes torchrun's options. Ctrl-C ends every process of the job; SIGUSR1 shows what each rank is doing. The exit
    status is that of the rank to blame (128 + signal), 124 after a hang, 2 for a command that makes no sense.
    """
    try:
        job = make(script, arguments, given)
    except Unusable as problem:
        raise click.UsageError(str(problem)) from problem
    # The terminal's click makes the usage error; the agent brings asyncio and the control plane along.
    from .agent import main

    ctx.exit(main(job))


def _option(option: Option) -> click.Option:
    """Return click's, with torchrun's PET_ variable."""
    flag = option.kind is bool
    return click.Option(
        [*([option.short] if option.short else []), option.name, option.key],
        default=option.default,
        type=None if flag else option.kind,
        is_flag=flag,
        metavar=option.metavar,
        show_default=option.shown,
        envvar=f"PET_{option.key.upper()}",
        help=option.help,
    )


command.params[:0] = [_option(option) for option in OPTIONS]
