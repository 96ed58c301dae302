"""`allhands run` as a click command: every spelling, help, and usage errors."""

from __future__ import annotations

from typing import Any

import click

from .options import OPTIONS, Option, UsageError, make_job
from .start import run_job

__all__ = ["command"]


@click.command(
    "run",
    context_settings={
        # The first word that is no option is the script: everything after it belongs to the script.
        "allow_interspersed_args": False,
        # --like_this is torchrun's older spelling of --like-this.
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Start SCRIPT once per rank, show the ranks' output, and name the rank to blame if the job dies.

    Accepts torchrun's options. Ctrl-C ends every process of the job; SIGUSR1 prints what each rank is doing. The exit
    status is that of the rank to blame (128 + signal), 124 after a hang, 2 for a usage error.
    """
    try:
        job = make_job(script, arguments, given)
    except UsageError as problem:
        raise click.UsageError(str(problem)) from problem
    ctx.exit(run_job(job))


def _click_option(option: Option) -> click.Option:
    flag = option.kind is bool
    return click.Option(
        [*([option.short] if option.short else []), option.name, option.key],
        default=option.default,
        type=None if flag else option.kind,
        is_flag=flag,
        metavar=option.metavar,
        show_default=option.show_default,
        envvar=f"PET_{option.key.upper()}",
        help=option.help,
    )


command.params[:0] = [_click_option(option) for option in OPTIONS]
