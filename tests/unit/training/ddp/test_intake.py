"""What the core does with a gradient that has come, and what it leaves to Python."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from allhands import _core
from allhands.groups import collectives


class _End:
    """What is called at the end of a pass, as long as there is one."""


class _Books:
    """Two parameters in a bucket and one in another, with what the reducer keeps of them."""

    def __init__(self, *, views: bool = True) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
        self.memory = torch.zeros(9)
        self.views = [self.memory[at : at + 3] for at in (0, 3, 6)]
        self.left_to_python: list[int] = []
        self.completed = 0
        self.intake = _core.GradHook(
            collectives.way(), tuple(self.parameters), self.left_to_python.append, self._complete
        )
        self.intake.set_places((0, 0, 1), tuple(self.views) if views else (None,) * 3, tuple(self.views))
        self.end: _End | None = _End()
        self.counts, self.left, self.used, self.needed = [0] * 3, [2, 1], [0] * 3, [1] * 3

    def _complete(self) -> None:
        self.completed += 1

    def begin(self) -> None:
        """Let a pass begin."""
        assert self.end is not None
        self.intake.begin_pass(weakref.ref(self.end), self.counts, self.left, self.used, self.needed)

    def give(self, index: int, gradient: Any) -> None:
        """Let a gradient come."""
        self.parameters[index].grad = gradient
        self.intake.on_gradient(index, self.parameters[index])


def test_a_gradient_is_counted_and_moved_into_its_bucket() -> None:
    """Each is a view of its bucket at once, and the bucket's last one is told."""
    books = _Books()
    books.begin()
    books.give(1, torch.tensor([1.0, 2.0, 3.0]))
    assert books.parameters[1].grad is books.views[1]
    assert books.memory.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0]
    assert (books.counts, books.left, books.used, books.completed) == ([0, 1, 0], [1, 1], [0, 1, 0], 0)
    books.give(0, torch.ones(3))
    assert (books.counts, books.left, books.completed, books.left_to_python) == ([1, 1, 0], [0, 1], 1, [])


def test_without_views_gradients_stay_where_they_came() -> None:
    """They are counted all the same."""
    books = _Books(views=False)
    books.begin()
    gradient = torch.ones(3)
    books.give(2, gradient)
    assert books.parameters[2].grad is gradient
    assert (books.counts, books.left, books.completed) == ([0, 0, 1], [2, 0], 1)


def test_gradients_that_all_stay_are_not_looked_at() -> None:
    """They are counted as they come, whatever they are; `gather` looks at them."""
    books = _Books()
    books.intake.set_places((0, 0, 1), None, tuple(books.views))
    books.begin()
    books.give(0, torch.ones(3))
    books.give(1, None)
    assert (books.counts, books.left, books.completed, books.left_to_python) == ([1, 1, 0], [0, 1], 1, [])
    assert books.intake.move_all()
    assert books.intake.gather((0,)) is not None
    assert books.intake.gather((0, 1)) is None


def test_who_trains_is_compared_with_what_was_known() -> None:
    """One that was frozen or unfrozen since is noticed, and so is a list that is none of these."""
    books = _Books()
    assert books.intake.trained_as([True] * 3)
    books.parameters[1].requires_grad_(False)
    assert not books.intake.trained_as([True] * 3)
    assert books.intake.trained_as([True, False, True])
    assert not books.intake.trained_as([])


def test_each_parameter_has_a_place() -> None:
    """A table of another length is refused: the core would read beyond it."""
    books = _Books()
    for of, views, likes in (((0,), None, (None,) * 3), ((0, 0, 1), (None,), (None,) * 3), ((0, 0, 1), None, ())):
        with pytest.raises(ValueError, match="for each parameter"):
            books.intake.set_places(of, views, likes)


def test_a_gradient_that_comes_several_times_completes_once() -> None:
    """A static graph may need two; a third is the reducer's to judge."""
    books = _Books()
    books.needed[2] = 2
    books.begin()
    books.give(2, torch.ones(3))
    assert (books.counts[2], books.left[1], books.completed) == (1, 1, 0)
    books.give(2, books.views[2])
    assert (books.counts[2], books.left[1], books.completed) == (2, 0, 1)
    books.give(2, books.views[2])
    assert (books.left_to_python, books.counts[2]) == ([2], 2)


@pytest.mark.parametrize(
    "gradient",
    [
        None,
        torch.ones(3, requires_grad=True),
        torch.ones(6)[::2],
        torch.ones(3).to_sparse(),
        torch._neg_view(torch.ones(3)),
    ],
    ids=["none", "derived", "strided", "sparse", "negated"],
)
def test_what_is_not_plain_is_left_to_python(gradient: Any) -> None:
    """Nothing is counted or moved then."""
    books = _Books()
    books.begin()
    books.give(0, gradient)
    assert (books.left_to_python, books.counts, books.memory.sum()) == ([0], [0, 0, 0], 0)
    assert not books.intake.move_all()


def test_outside_of_a_pass_everything_is_left_to_python() -> None:
    """Before it begins, after it is over, and when an exception ended it."""
    books = _Books()
    books.give(0, torch.ones(3))
    books.begin()
    books.intake.disable()
    books.give(0, torch.ones(3))
    books.begin()
    books.end = None
    books.give(0, torch.ones(3))
    assert (books.left_to_python, books.counts) == ([0, 0, 0], [0, 0, 0])


def test_what_came_otherwise_is_moved_at_the_end() -> None:
    """All gradients lie in their buckets then, or it is said that they do not."""
    books = _Books()
    for parameter in books.parameters[:2]:
        parameter.grad = torch.ones(3)
    assert not books.intake.move_all()
    books.parameters[2].grad = torch.full((3,), 2.0)
    assert books.intake.move_all()
    assert books.memory.tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert all(each.grad is view for each, view in zip(books.parameters, books.views, strict=True))


def test_gradients_that_can_stay_are_gathered() -> None:
    """In the order that was asked for, and as they are."""
    books = _Books(views=False)
    for parameter in books.parameters:
        parameter.grad = torch.ones(3)
    found = books.intake.gather((2, 0))
    assert found is not None
    assert [id(each) for each in found] == [id(books.parameters[index].grad) for index in (2, 0)]


@pytest.mark.parametrize("odd", ["none", "strides", "shape", "derived", "frozen", "sparse", "shared", "overlapping"])
def test_gradients_that_cannot_stay_are_left_to_python(odd: str) -> None:
    """One is enough: it is not there, lies in another order, is computed from, or shares memory with another one."""
    books = _Books(views=False)
    flat = torch.ones(8)
    gradients = {
        "strides": torch.ones(6)[::2],
        "shape": torch.ones(4),
        "derived": torch.ones(3, requires_grad=True),
        "sparse": torch.ones(3).to_sparse(),
        "shared": flat[:3],
        "overlapping": flat[2:5],
    }
    books.parameters[0].grad = flat[:3]
    books.parameters[1].grad = torch.ones(3)
    if odd == "shape":
        books.parameters[1].data = torch.zeros(4)
        books.parameters[1].grad = gradients[odd]
    elif odd != "none":
        books.parameters[1].grad = gradients.get(odd, torch.ones(3))
    else:
        books.parameters[1].grad = None
    books.parameters[1].requires_grad_(odd != "frozen")
    assert books.intake.gather((0, 1)) is None


def test_only_parameters_can_be_gathered() -> None:
    """A number beyond the last one is an error of the caller, and so is no number at all."""
    books = _Books(views=False)
    books.parameters[0].grad = torch.ones(3)
    with pytest.raises(IndexError):
        books.intake.gather((0, 7))
    with pytest.raises(TypeError):
        books.intake.gather(("no number",))  # type: ignore[arg-type]
