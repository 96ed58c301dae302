from __future__ import annotations

import msgspec

from allhands.diagnosis import CATALOGUE
from allhands.doctor import Finding, exit_code
from allhands.doctor.finding import SECTIONS, green, red, yellow
from allhands.doctor.screen import SCHEMA, render, report

GOOD = [green(section, "one", f"{section} are well", "seen") for section in SECTIONS]
BAD = [
    yellow(
        "names",
        "two",
        "name-shadowed",
        "a name is shadowed",
        why="two say so",
        fix="agree",
        commands=("grep x", "sed y"),
    ),
    red("names", "three", "address-unresolvable", "no such name", why="it says so", fix="spell it right"),
]


def test_all_green_is_a_line_for_each_section() -> None:
    """Where nothing is wrong there is a heading, a line for each section and a summary, and the exit status is 0."""
    shown = render(GOOD, "heading").splitlines()
    assert len(shown) == len(SECTIONS) + 2
    assert shown[0] == "heading"
    assert shown[-1] == f"all {len(GOOD)} checks are green"
    assert exit_code(GOOD) == 0


def test_what_is_not_green_has_its_evidence_and_fix() -> None:
    """The worst of a section comes first; each has its name, why, fix, and commands that are never broken."""
    shown = render([*GOOD, *BAD], "heading")
    assert shown.index("[address-unresolvable]") < shown.index("[name-shadowed]")
    for words in ("why   two say so", "fix   agree", "type  grep x\n", "      sed y\n", "1 red, 1 yellow, 6 green"):
        assert words in shown
    assert (exit_code(BAD), exit_code(BAD[:1])) == (1, 0)


def test_colours_only_where_asked_and_evidence_of_green_too() -> None:
    """Nothing but text goes into a file; -v shows what green rests on."""
    assert "\x1b" not in render([*GOOD, *BAD], "heading")
    assert "\x1b[31m" in render([*GOOD, *BAD], "heading", colour=True)
    assert "names are well (seen)" in render(GOOD, "heading", verbose=True)


def test_long_words_fit_the_width() -> None:
    """Sentences are wrapped to the terminal; commands stay whole."""
    long = red("names", "x", "no-route", "word " * 60, why="why " * 60, fix="fix " * 60, commands=("command " * 30,))
    lines = render([long], "heading", width=80).splitlines()
    assert max(len(line) for line in lines if "command" not in line and "explain" not in line) <= 80


def test_the_report_for_programs_is_stable() -> None:
    """The fields of --json; a change of them needs a new SCHEMA."""
    made = report([*GOOD, *BAD], host="here", target="there:1", seconds=0.5, done={"descriptors": "raised"})
    assert SCHEMA == 1
    assert set(made) == {"schema", "host", "target", "seconds", "exit_code", "counts", "findings", "done"}
    assert made["counts"] == {"green": 6, "yellow": 1, "red": 1}
    assert made["exit_code"] == 1
    fields = {"section", "check", "level", "what", "why", "fix", "slug", "certain", "commands", "details"}
    assert all(set(each) == fields for each in made["findings"])
    assert [msgspec.convert(each, Finding) for each in made["findings"]] == [*GOOD, *BAD]


def test_what_was_tried_is_no_suspicion_any_more() -> None:
    """Rules of this machine's own firewall are yellow only where nobody tried whether they are in the way."""
    from allhands.doctor.run_checks import _weighed

    rules = yellow("network", "firewall", "ports-filtered", "rules")
    assert _weighed([rules]) == [rules]
    assert _weighed([rules, GOOD[0], green("network", "ports", "open")])[0] == GOOD[0]


def test_every_name_that_a_check_may_give_has_its_page() -> None:
    """Whatever stands in brackets on the screen can be explained."""
    import re
    from pathlib import Path

    import allhands.doctor

    folder = Path(allhands.doctor.__file__).parent
    given = {
        slug
        for path in folder.glob("*.py")
        for slug in re.findall(r'^\s+"([a-z]+(?:-[a-z]+)+)",$', path.read_text(), flags=re.MULTILINE)
    }
    checks = {"own-name", "target-name", "name-time", "master-address", "gpu-users", "packet-size", "round-trip"}
    assert len(given & set(CATALOGUE)) >= 15
    assert given - set(CATALOGUE) <= checks
