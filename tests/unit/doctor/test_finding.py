from __future__ import annotations

import msgspec

from allhands.diagnosis import CATALOGUE
from allhands.doctor import Finding, exit_code
from allhands.doctor.finding import SCHEMA, SECTIONS, Section, render, report

NAMES = Section("names")
NETWORK = Section("network")
GOOD = [Section(section).green("one", f"{section} are well", "seen") for section in SECTIONS]
BAD = [
    NAMES.yellow(
        "two",
        "name-shadowed",
        "a name is shadowed",
        why="two say so",
        fix="agree",
        commands=("grep x", "sed y"),
    ),
    NAMES.red("three", "address-unresolvable", "no such name", why="it says so", fix="spell it right"),
]


def test_green_is_one_line_per_section() -> None:
    """If nothing is wrong there is a heading, a line for each section and a summary, and the exit status is 0."""
    shown = render(GOOD, "heading").splitlines()
    assert len(shown) == len(SECTIONS) + 2
    assert shown[0] == "heading"
    assert shown[-1] == f"all {len(GOOD)} checks are green"
    assert exit_code(GOOD) == 0


def test_problems_have_evidence_and_fix() -> None:
    """The worst of a section comes first; each has its name, why, fix, and commands that are never broken."""
    shown = render([*GOOD, *BAD], "heading")
    assert shown.index("[address-unresolvable]") < shown.index("[name-shadowed]")
    for words in ("why   two say so", "fix   agree", "type  grep x\n", "      sed y\n", "1 red, 1 yellow, 6 green"):
        assert words in shown
    assert (exit_code(BAD), exit_code(BAD[:1])) == (1, 0)


def test_colour_and_verbose() -> None:
    """There are no escape codes without colour; -v shows the evidence of green findings."""
    assert "\x1b" not in render([*GOOD, *BAD], "heading")
    assert "\x1b[31m" in render([*GOOD, *BAD], "heading", colour=True)
    assert "names are well (seen)" in render(GOOD, "heading", verbose=True)


def test_text_is_wrapped() -> None:
    """Sentences are wrapped to the terminal; commands stay whole."""
    long = NAMES.red("x", "no-route", "word " * 60, why="why " * 60, fix="fix " * 60, commands=("command " * 30,))
    lines = render([long], "heading", width=80).splitlines()
    assert max(len(line) for line in lines if "command" not in line and "explain" not in line) <= 80


def test_report_fields_are_stable() -> None:
    """The fields of --json; a change of them needs a new SCHEMA."""
    made = report([*GOOD, *BAD], host="here", target="there:1", seconds=0.5, done={"descriptors": "raised"})
    assert SCHEMA == 1
    assert set(made) == {"schema", "host", "target", "seconds", "exit_code", "counts", "findings", "done"}
    assert made["counts"] == {"green": 6, "yellow": 1, "red": 1}
    assert made["exit_code"] == 1
    fields = {"section", "check", "level", "what", "why", "fix", "slug", "certain", "commands", "details"}
    assert all(set(each) == fields for each in made["findings"])
    assert [msgspec.convert(each, Finding) for each in made["findings"]] == [*GOOD, *BAD]


def test_disproved_warning_is_removed() -> None:
    """Rules of this machine's own firewall are yellow only if no connection through it was tried."""
    from allhands.doctor.run_checks import _without_disproved

    rules = NETWORK.yellow("firewall", "ports-filtered", "rules")
    assert _without_disproved([rules]) == [rules]
    assert _without_disproved([rules, GOOD[0], NETWORK.green("ports", "open")])[0] == GOOD[0]


def test_every_slug_has_a_page() -> None:
    """Every slug on the screen is in the catalogue."""
    import re
    from pathlib import Path

    import allhands.doctor

    folder = Path(allhands.doctor.__file__).parent
    given = {
        slug
        for path in folder.glob("*.py")
        for slug in re.findall(r'^\s+(?:slug=)?"([a-z]+(?:-[a-z]+)+)",$', path.read_text(), flags=re.MULTILINE)
    }
    others = {
        "nvidia-smi",
        "own-name",
        "target-name",
        "name-time",
        "master-address",
        "gpu-users",
        "packet-size",
        "round-trip",
    }
    assert len(given & set(CATALOGUE)) >= 15
    assert given - set(CATALOGUE) <= others
