from __future__ import annotations

from pathlib import Path

import pytest

from allhands import diagnosis
from allhands.diagnosis import CATALOGUE, explain, page
from allhands.errors import ArgumentError

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("slug", list(CATALOGUE))
def test_a_slug_gives_its_page(slug: str) -> None:
    """The page is shown as it is, except that links to other pages are only their names."""
    shown = explain.render(slug)
    assert shown.startswith(f"# {slug}\n")
    assert ".md)" not in shown
    assert f"   [{slug}]\n" in shown
    assert len(shown.splitlines()) == len(page(slug).splitlines())


def test_no_slug_lists_all_in_order() -> None:
    """Without a slug every one is listed once, in the catalogue's order, its meaning aligned with the others'."""
    lines = explain.render(None).splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert [row.split()[0] for row in rows] == list(CATALOGUE)
    width = max(map(len, CATALOGUE)) + 4
    assert [row[width:] for row in rows] == [entry.meaning for entry in CATALOGUE.values()]
    assert all(row[width - 1] == " " for row in rows)


def test_list_is_grouped() -> None:
    """The list has the catalogue's sections as headings, each found at its first slug."""
    lines = explain.render(None).splitlines()
    for slug, heading in explain._SECTIONS.items():
        assert lines[lines.index(heading) + 1].split()[0] == slug
    assert next(iter(explain._SECTIONS)) == next(iter(CATALOGUE))


def test_unknown_slug_suggests_the_nearest() -> None:
    """A mistyped slug is an argument error that asks whether the right one was meant."""
    with pytest.raises(ArgumentError, match=r"Did you mean missing-ranks") as caught:
        explain.render("mising-ranks")
    assert caught.value.slug == "invalid-argument"
    assert "'mising-ranks'" in str(caught.value)


def test_unlike_any_slug_suggests_nothing() -> None:
    """A word that resembles no slug is answered without a guess."""
    with pytest.raises(ArgumentError) as caught:
        explain.render("zzzqq")
    assert "Did you mean" not in str(caught.value)
    assert "allhands explain" in str(caught.value)


def test_index_in_docs_is_up_to_date() -> None:
    """docs/diagnoses.md is what `index` makes of the catalogue."""
    assert (DOCS / "diagnoses.md").read_text(encoding="utf-8") == explain.index()


def test_index_links_to_pages_that_exist() -> None:
    """Every link of the index leads to a page."""
    for slug in CATALOGUE:
        assert f"| [{slug}]({explain._PAGES}/{slug}.md) |" in explain.index()
        assert (DOCS / explain._PAGES / f"{slug}.md").is_file()


def test_docs_show_the_same_pages() -> None:
    """docs/diagnoses is a relative link to the pages, not a copy."""
    link = DOCS / "diagnoses"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (Path(diagnosis.__file__).parent / "pages").resolve()
