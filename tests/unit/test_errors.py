from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from allhands import errors
from allhands.diagnosis import CATALOGUE, Diagnosis
from allhands.errors import AllhandsError, GroupStateError, StoreTimeout, WorldError, error, fail

CLASSES: list[type[AllhandsError]] = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AllhandsError)
]
FOUND = Diagnosis(
    "peer-failed", "rank 3 raised", who="rank 3", ranks=(3,), hosts=("node-b",), certain=False, traceback="KeyError: 1"
)

every_class = pytest.mark.parametrize("kind", CLASSES)


def parents() -> dict[str, str]:
    """Return class -> parent as the module's docstring draws it."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"( +(?:│ +)*(?:[├└]── )?)([A-Z]\w+)", line)
        if match is None:
            continue
        column = len(match[1])
        above = [(at, name) for at, name in above if at < column]
        if above:
            drawn[match[2]] = above[-1][1]
        above.append((column, match[2]))
    return drawn


def test_docstring_draws_the_real_tree() -> None:
    """The tree in the docstring has every exception, each below its real parent."""
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES if kind is not AllhandsError}
    assert parents() == real


def test_everything_public_is_listed() -> None:
    """`__all__` is every exception and the three functions, in order."""
    names = {kind.__name__ for kind in CLASSES} | {"adopt", "error", "fail"}
    assert set(errors.__all__) == names
    assert errors.__all__ == sorted(errors.__all__)


@every_class
def test_pickling_keeps_everything(kind: type[AllhandsError]) -> None:
    """An exception that crosses a process boundary keeps its class, its diagnosis and its words."""
    before = kind(FOUND)
    after = pickle.loads(pickle.dumps(before))  # noqa: S301  # our own bytes
    assert type(after) is kind
    assert after.diagnosis == FOUND
    assert str(after) == str(before)


@every_class
def test_attributes_are_for_programs(kind: type[AllhandsError]) -> None:
    """Slug, ranks and hosts can be read without parsing the text."""
    raised = kind(FOUND)
    assert (raised.slug, raised.ranks, raised.hosts) == ("peer-failed", (3,), ("node-b",))


@every_class
def test_each_is_documented(kind: type[AllhandsError]) -> None:
    """Each exception explains itself in its docstring."""
    assert "__doc__" in vars(kind)
    assert kind.__doc__


def test_text_is_the_diagnosis_without_the_title() -> None:
    """A traceback puts the class's name before the text, so the text does not repeat it."""
    assert str(error(FOUND)).splitlines()[0] == "rank 3 raised   [peer-failed]"
    assert f"PeerFailed: {error(FOUND)}" == FOUND.render("PeerFailed")


@pytest.mark.parametrize("slug", list(CATALOGUE))
def test_error_takes_the_class_of_the_slug(slug: str) -> None:
    """`error` and `fail` raise the catalogue's exception of the slug."""
    kind = getattr(errors, CATALOGUE[slug].error)
    assert type(error(Diagnosis(slug, "x"))) is kind
    raised = fail(slug, "x", who="w", ranks=(1,))
    assert type(raised) is kind
    assert raised.diagnosis == Diagnosis(slug, "x", who="w", ranks=(1,))


@every_class
def test_each_class_has_a_slug_below_it(kind: type[AllhandsError]) -> None:
    """No exception exists that nothing can raise."""
    assert any(issubclass(getattr(errors, entry.error), kind) for entry in CATALOGUE.values())


def test_builtin_bases_that_callers_catch() -> None:
    """Code that catches RuntimeError, or ValueError where torch raises it, still works."""
    assert issubclass(AllhandsError, RuntimeError)
    for kind in (errors.ArgumentError, WorldError, GroupStateError, errors.NotInitialised):
        assert issubclass(kind, ValueError)


@pytest.fixture
def bases() -> Iterator[None]:
    """Undo what `adopt` does to the tree."""
    before = AllhandsError.__bases__, StoreTimeout.__bases__
    yield
    StoreTimeout.__bases__ = before[1]
    AllhandsError.__bases__ = before[0]


@pytest.mark.usefixtures("bases")
def test_adopted_errors_are_caught_as_torchs() -> None:
    """Once torch is imported, `except torch.distributed.DistError` catches ours, the store's by its own type."""
    import torch.distributed as dist

    errors.adopt(dist.DistError, dist.DistStoreError)
    errors.adopt(dist.DistError, dist.DistStoreError)  # a second time changes nothing
    for slug in CATALOGUE:
        with pytest.raises(dist.DistError) as caught:
            raise fail(slug, "x")
        assert isinstance(caught.value, dist.DistStoreError) == (slug == "store-timeout")
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.slug == slug  # type: ignore[attr-defined]  # pytest types it as torch's
        assert str(caught.value) == f"x   [{slug}]"
    again = pickle.loads(pickle.dumps(fail("store-timeout", "x")))  # noqa: S301  # our own bytes
    assert isinstance(again, dist.DistStoreError)
