from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from allhands import __version__, cli
from allhands.bench import rollcall
from allhands.diagnosis import CATALOGUE
from allhands.errors import fail
from allhands.settings import LAUNCHER_TABLE, TABLE

COMMAND = Path(sys.executable).with_name("allhands")

# Prints which modules a command line loaded, after it has run.
PROBE = """
import sys
from allhands.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "rich", "asyncio"}))
"""


def call(*arguments: str) -> Result:
    """Run the command line in this process, as it would be without a terminal."""
    return CliRunner().invoke(cli.main, list(arguments), prog_name="allhands", catch_exceptions=False)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, with none of this process's ranks in its environment."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def commands(group: click.Group, *above: str) -> list[tuple[str, ...]]:
    """Return every command below ``group``, groups included, as the words that call it."""
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        found.append((*above, name))
        if isinstance(command, click.Group):
            found += commands(command, *above, name)
    return found


def test_version() -> None:
    """`--version` prints the name and the version, and nothing else."""
    result = call("--version")
    assert (result.exit_code, result.output) == (0, f"allhands {__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(arguments: tuple[str, ...]) -> None:
    """The help, printed for no command too, lists each command once and no environment variable."""
    result = call(*arguments)
    assert result.exit_code == 0
    for name in cli.main.commands:
        assert result.output.count(f"\n  {name} ") == 1
    assert "ALLHANDS_" not in result.output
    assert "allhands help environment" in result.output


def test_help_environment() -> None:
    """`help environment` lists each variable once with its meaning; those of the launcher are in a second table."""
    result = call("help", "environment")
    assert result.exit_code == 0
    ours, _, launchers = result.output.partition("Set by the launcher only:")
    for table, shown in ((TABLE, ours), (LAUNCHER_TABLE, launchers)):
        words = " ".join(shown.split())
        for name, meaning in table.items():
            assert result.output.count(f"\n  {name} ") == 1
            assert f"{name} {meaning}" in words


def test_help_of_a_command() -> None:
    """`help COMMAND` prints the help of that command; without one, that of the program."""
    assert call("help", "explain").output == call("explain", "--help").output
    assert call("help").output == call("--help").output
    unknown = call("help", "explian")
    assert unknown.exit_code == 2
    assert "Did you mean 'explain'?" in unknown.stderr


def test_docs_list_the_environment() -> None:
    """docs/environment.md has the tables of `allhands.settings`, row by row."""
    text = (Path(__file__).parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")
    ours, _, launchers = text.partition("## Set by the launcher only")
    for table, shown in ((TABLE, ours), (LAUNCHER_TABLE, launchers)):
        assert re.findall(r"^\| `(ALLHANDS_\w+)` \| (.*) \|$", shown, flags=re.MULTILINE) == list(table.items())


def test_help_shows_ungrouped_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of no group is shown under "Other"."""
    monkeypatch.setitem(cli.main.commands, "newcomer", click.Command("newcomer", help="Be new."))
    output = call("--help").output
    assert output.index("Other:") < output.index("newcomer")


@pytest.mark.parametrize("words", commands(cli.main), ids=" ".join)
def test_each_command_has_help(words: tuple[str, ...]) -> None:
    """The first sentence of each command's help fits into the list of commands."""
    result = call(*words, "--help")
    assert result.exit_code == 0
    assert "..." not in call(*words[:-1], "--help").output.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explian"], "there is no command 'explian'. Did you mean 'explain'?"),
        (["bench", "rolcall"], "there is no command 'rolcall'. Did you mean 'rollcall'?"),
        (["xyzzy"], "there is no command 'xyzzy'."),
        (["--nonsense"], "--nonsense"),
        (["explain", "missing-ranks", "peer-lost"], "peer-lost"),
        (["explain", "peer-fialed"], "Did you mean peer-failed"),
        (["bench", "rollcall", "--members", "8,many"], "'8,many' is not a list of whole numbers"),
        (["bench", "rollcall", "--members", "1"], "at least 2 members"),
        (["bench", "rollcall", "--rounds", "0"], "--rounds"),
    ],
    ids=" ".join,
)
def test_usage_error(arguments: list[str], words: str) -> None:
    """A usage error exits with 2 and prints the reason on standard error, with the nearest valid name."""
    result = call(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_failure_is_its_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure exits with 1 and prints its diagnosis on standard error, with no traceback of ours."""

    def run(*_: object, **__: object) -> list[dict[str, object]]:
        raise fail("fd-limit", "too few", who="someone", why="a limit", fix="raise it")

    monkeypatch.setattr(rollcall, "run", run)
    result = call("bench", "rollcall")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "ResourceError: too few   [fd-limit]\n  who:  someone\n  why:  a limit\n  fix:  raise it\n"
    )


def test_explain_lists_all() -> None:
    """Without a name, `explain` lists every diagnosis."""
    result = call("explain")
    assert result.exit_code == 0
    for slug in CATALOGUE:
        assert f"\n  {slug} " in result.output


@pytest.mark.parametrize("name", ["missing-ranks", "[missing-ranks]"])
def test_explain_prints_the_page(name: str) -> None:
    """With a name, in brackets or without, the page comes as plain text where there is no terminal."""
    result = call("explain", name)
    assert result.exit_code == 0
    assert result.output.startswith("# missing-ranks\n")
    assert "\x1b" not in result.output


def test_explain_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the page is laid out: headings lose their number signs, and lines fit the window."""
    monkeypatch.setattr(cli, "_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    result = call("explain", "missing-ranks")
    assert result.exit_code == 0
    assert "What it means" in result.output
    assert "## What it means" not in result.output
    assert max(map(len, result.output.splitlines())) <= 60


def test_whoami(monkeypatch: pytest.MonkeyPatch) -> None:
    """`whoami` prints the values with their reasons, as text or as JSON."""
    monkeypatch.setenv("ALLHANDS_RANK", "1")
    monkeypatch.setenv("ALLHANDS_WORLD_SIZE", "2")
    text = call("whoami")
    assert text.exit_code == 0
    assert "ALLHANDS_RANK=1" in text.output
    data = call("whoami", "--json")
    assert data.exit_code == 0
    assert json.loads(data.stdout)["world"]["rank"]["value"] == 1


def test_whoami_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rank cannot be determined, the report begins with the diagnosis and the exit status is 1."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    text = call("whoami")
    assert text.exit_code == 1
    assert "[incomplete-environment]" in text.output.splitlines()[0]
    data = call("whoami", "--json")
    assert data.exit_code == 1
    assert json.loads(data.stdout)["error"]["slug"] == "incomplete-environment"


def test_bench_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench rollcall` passes its options, and prints the rows that were measured as JSON."""
    asked: list[tuple[object, ...]] = []

    def run(members: list[int], rounds: int, *, transport: str) -> list[dict[str, object]]:
        asked.append((members, rounds, transport))
        return [{"members": number} for number in members]

    monkeypatch.setattr(rollcall, "run", run)
    result = call("bench", "rollcall", "--members", "8,16", "--rounds", "2", "--transport", "unix", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [{"members": 8}, {"members": 16}])
    call("bench", "rollcall", "--json")
    assert asked == [([8, 16], 2, "unix"), ([64, 256, 1024, 4096], 3, "tcp")]


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["engines"], ["whoami"], ["explain", "peer-lost"], ["explain"]]
)
def test_imports_on_demand(arguments: list[str]) -> None:
    """No command imports torch, and one whose output is piped does not import rich."""
    done = run(sys.executable, "-W", "error", "-c", PROBE, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_bench_needs_no_torch() -> None:
    """The roll call is measured, on real sockets, without torch."""
    done = run(sys.executable, "-W", "error", "-c", PROBE, "bench", "rollcall", "--members", "2,4", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "roll call" in done.stdout
    assert "torch" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["whoami"], 1), (["explain", "nothing-like-it"], 2)]
)
def test_the_script_and_the_module(arguments: list[str], status: int) -> None:
    """The installed script and `python -m allhands` do the same, with the same exit status."""
    script = run(COMMAND, *arguments, RANK="5", WORLD_SIZE="2")
    module = run(sys.executable, "-m", "allhands", *arguments, RANK="5", WORLD_SIZE="2")
    assert (script.returncode, module.returncode) == (status, status), script.stderr + module.stderr
    assert "Traceback" not in script.stderr + module.stderr


def test_closed_pipe() -> None:
    """Output into a pipe whose reader has exited (`| head -1`) ends without a traceback."""
    done = subprocess.run(
        ["/bin/sh", "-c", f'"{COMMAND}" explain | head -1'], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("Identity of this process\n", "")
