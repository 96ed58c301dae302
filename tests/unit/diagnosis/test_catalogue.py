from __future__ import annotations

import re

from allhands.diagnosis import CATALOGUE, closest, title
from allhands.diagnosis.catalogue import _ENTRIES


def test_slugs_are_unique_words() -> None:
    """Each slug occurs once in the catalogue, in lower-case words joined by hyphens."""
    assert len(CATALOGUE) == len(_ENTRIES)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", slug) for slug in CATALOGUE)


def test_meanings_are_one_line() -> None:
    """A meaning is one line without a full stop, so that it fits in a list."""
    for entry in CATALOGUE.values():
        assert entry.meaning
        assert "\n" not in entry.meaning
        assert not entry.meaning.endswith(".")


def test_title_is_the_name_of_the_exception() -> None:
    """The title of a message is the name of the exception that carries it."""
    assert title("missing-ranks") == "RollCallTimeout"
    assert title("forked-process") == "NotInitialised"


def test_closest_finds_a_mistyped_slug() -> None:
    """A slug with a typing error is found first; something else altogether finds nothing."""
    assert closest("mising-ranks")[0] == "missing-ranks"
    assert closest("port-used")[0] == "port-in-use"
    assert closest("zzzqq") == []
