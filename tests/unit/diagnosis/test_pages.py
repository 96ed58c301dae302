from __future__ import annotations

import re
from pathlib import Path

import pytest

from allhands import diagnosis, errors, settings
from allhands.diagnosis import CATALOGUE, Diagnosis, page, title
from allhands.doctor import Finding
from allhands.doctor.finding import block

SECTIONS = ["What you see", "What it means", "Usual causes", "What to do", "When it is raised"]
FOLDER = Path(diagnosis.__file__).parent / "pages"

every_slug = pytest.mark.parametrize("slug", list(CATALOGUE))

# What no rank raises is shown by the doctor, and looks as on its screen.
RAISED = [slug for slug in CATALOGUE if title(slug) != "AllhandsError"]
FOUND = [slug for slug in CATALOGUE if slug not in RAISED]


def example(slug: str) -> list[str]:
    """Return the lines of the page's example, without their indentation."""
    _, _, rest = page(slug).partition("An example:\n\n")
    block = rest.split("\n\n", 1)[0]
    return [line.removeprefix("    ") for line in block.splitlines()]


def parse(lines: list[str]) -> Diagnosis:
    """Read a rendered diagnosis back."""
    heading = re.fullmatch(r"\w+: (.+)   \[([a-z-]+)\]", lines[0])
    assert heading, lines[0]
    parts: dict[str, list[str]] = {}
    label = ""
    for line in lines[1:]:
        if match := re.fullmatch(r"  (who|why|fix):  (.+)", line):
            label = match[1]
            parts[label] = [match[2]]
        elif line == "  its traceback:":
            label = "traceback"
            parts[label] = []
        else:
            parts[label].append(line.removeprefix("    | " if label == "traceback" else "        "))
    return Diagnosis(heading[2], heading[1], **{label: "\n".join(text) for label, text in parts.items()})  # type: ignore[arg-type]  # only the text fields are named


@every_slug
def test_page_has_its_sections(slug: str) -> None:
    """Every slug has a page: its name, one sentence of meaning, and the five sections in order, none empty."""
    text = page(slug)
    name, meaning, *_ = text.split("\n\n")
    assert name == f"# {slug}"
    assert re.fullmatch(r"[^#\n][^#]*\.", meaning)
    found = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert found == SECTIONS
    for body in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert body.strip()


@every_slug
def test_page_is_short(slug: str) -> None:
    """A page fits on a screen or little more; a stuck reader does not scroll through an essay."""
    assert 25 <= len(page(slug).splitlines()) <= 50


@every_slug
def test_exception_exists(slug: str) -> None:
    """The exception that the catalogue names for a slug is one of ours."""
    kind = getattr(errors, title(slug))
    assert issubclass(kind, errors.AllhandsError)


def test_no_page_without_a_slug() -> None:
    """The folder holds the pages of the catalogue and nothing else."""
    assert {path.name for path in FOLDER.iterdir()} == {f"{slug}.md" for slug in CATALOGUE}


@pytest.mark.parametrize("slug", FOUND)
def test_example_is_what_the_doctor_would_show(slug: str) -> None:
    """The page of a finding of the doctor has an example with reason and fix, as the doctor prints it."""
    first, *rest = example(slug)
    mark, what = first.split(" ", 1)
    labels = {line[4:8].strip(): line[10:] for line in rest if line[4:8].strip() in {"why", "fix"}}
    commands = tuple(line[10:] for line in rest if line[4:8].strip() in {"type", ""})
    found = Finding(
        "",
        "",
        "red" if mark == "X" else "yellow",
        what.removesuffix(f"   [{slug}]"),
        labels["why"],
        labels["fix"],
        slug,
        commands=commands,
    )
    assert what.endswith(f"   [{slug}]")
    shown = block(found, "", width=10_000, colour=False)
    assert [line[15:] for line in shown] == [first, *rest]


@pytest.mark.parametrize("slug", RAISED)
def test_example_is_what_the_code_would_print(slug: str) -> None:
    """A page's example has the right exception and slug, names who and what to do, and is formatted as rendered."""
    lines = example(slug)
    found = parse(lines)
    assert found.slug == slug
    assert found.who
    assert found.fix
    assert "\n".join(lines) == found.render(title(slug))


@every_slug
def test_page_names_only_known_variables(slug: str) -> None:
    """Every ALLHANDS_* variable that a page mentions is in the table of settings."""
    assert set(re.findall(r"ALLHANDS_[A-Z_]*[A-Z]", page(slug))) <= set(settings.TABLE) | set(settings.LAUNCHER_TABLE)


@every_slug
def test_page_names_only_known_slugs(slug: str) -> None:
    """Every name in brackets is a slug, and every link to another page leads to the page it names."""
    text = page(slug)
    assert set(re.findall(r"\[([a-z]+(?:-[a-z]+)+)\]", text)) <= set(CATALOGUE)
    for name, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", text):
        assert target == f"{name}.md"
        assert name in CATALOGUE
        assert name != slug


@every_slug
def test_page_names_only_commands_that_exist(slug: str) -> None:
    """Every command of allhands on a page exists."""
    code = re.findall(r"`([^`]+)`|^ {7}(.+)$", page(slug), flags=re.MULTILINE)
    named = {name for spans in code for name in re.findall(r"(?<!import )\ballhands (\w+)", " ".join(spans))}
    assert named <= {"explain", "whoami", "bench", "doctor", "run"}


@every_slug
def test_page_names_only_exceptions_that_exist(slug: str) -> None:
    """Every exception on a page exists."""
    for name in re.findall(r"except allhands\.(\w+)", page(slug)):
        assert name in errors.__all__


def test_unknown_slug_has_no_page() -> None:
    """A slug that is not in the catalogue is a KeyError, never a file name to try."""
    with pytest.raises(KeyError):
        page("../words")
