"""The C hook of parameters: the gradients it counts and moves, and those it passes to Python."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from allhands import _core
from allhands.groups import collectives


class _End:
    """Stands for the callback at the end of a pass."""


class _Fixture:
    """Two parameters in a bucket and one in another, with the state of the reducer."""

    def __init__(self, *, views: bool = True) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
        self.memory = torch.zeros(9)
        self.views = [self.memory[at : at + 3] for at in (0, 3, 6)]
        self.passed_to_python: list[int] = []
        self.completed = 0
        self.grad_hook = _core.GradHook(
            collectives.torch_facts(), tuple(self.parameters), self.passed_to_python.append, self._complete
        )
        self.grad_hook.set_places((0, 0, 1), tuple(self.views) if views else (None,) * 3, tuple(self.views))
        self.end: _End | None = _End()
        self.counts, self.left, self.used, self.needed = [0] * 3, [2, 1], [0] * 3, [1] * 3

    def _complete(self) -> None:
        self.completed += 1

    def begin(self) -> None:
        """Start a pass."""
        assert self.end is not None
        self.grad_hook.begin_pass(weakref.ref(self.end), self.counts, self.left, self.used, self.needed)

    def set_gradient(self, index: int, gradient: Any) -> None:
        """Set a gradient and call the hook."""
        self.parameters[index].grad = gradient
        self.grad_hook.on_gradient(index, self.parameters[index])


def test_a_gradient_is_counted_and_moved_into_its_bucket() -> None:
    """Each becomes a view of its bucket at once, and the last one of a bucket is reported."""
    fixture = _Fixture()
    fixture.begin()
    fixture.set_gradient(1, torch.tensor([1.0, 2.0, 3.0]))
    assert fixture.parameters[1].grad is fixture.views[1]
    assert fixture.memory.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0]
    assert (fixture.counts, fixture.left, fixture.used, fixture.completed) == ([0, 1, 0], [1, 1], [0, 1, 0], 0)
    fixture.set_gradient(0, torch.ones(3))
    assert (fixture.counts, fixture.left, fixture.completed, fixture.passed_to_python) == ([1, 1, 0], [0, 1], 1, [])


def test_without_views_gradients_are_not_moved() -> None:
    """They are only counted."""
    fixture = _Fixture(views=False)
    fixture.begin()
    gradient = torch.ones(3)
    fixture.set_gradient(2, gradient)
    assert fixture.parameters[2].grad is gradient
    assert (fixture.counts, fixture.left, fixture.completed) == ([0, 0, 1], [2, 0], 1)


def test_gradients_in_place_are_checked_when_gathered() -> None:
    """They are only counted when they arrive; `gather` checks them."""
    fixture = _Fixture()
    fixture.grad_hook.set_places((0, 0, 1), None, tuple(fixture.views))
    fixture.begin()
    fixture.set_gradient(0, torch.ones(3))
    fixture.set_gradient(1, None)
    assert (fixture.counts, fixture.left, fixture.completed, fixture.passed_to_python) == ([1, 1, 0], [0, 1], 1, [])
    assert fixture.grad_hook.gather((0,)) is not None
    assert fixture.grad_hook.gather((0, 1)) is None


def test_each_parameter_has_a_place() -> None:
    """A table of another length raises: the core would read beyond its end."""
    fixture = _Fixture()
    for of, views, likes in (((0,), None, (None,) * 3), ((0, 0, 1), (None,), (None,) * 3), ((0, 0, 1), None, ())):
        with pytest.raises(ValueError, match="for each parameter"):
            fixture.grad_hook.set_places(of, views, likes)


def test_gradient_that_arrives_several_times() -> None:
    """A static graph may need two; a third is passed to Python."""
    fixture = _Fixture()
    fixture.needed[2] = 2
    fixture.begin()
    fixture.set_gradient(2, torch.ones(3))
    assert (fixture.counts[2], fixture.left[1], fixture.completed) == (1, 1, 0)
    fixture.set_gradient(2, fixture.views[2])
    assert (fixture.counts[2], fixture.left[1], fixture.completed) == (2, 0, 1)
    fixture.set_gradient(2, fixture.views[2])
    assert (fixture.passed_to_python, fixture.counts[2]) == ([2], 2)


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
def test_unusual_gradients_are_passed_to_python(gradient: Any) -> None:
    """The core does not count or move them."""
    fixture = _Fixture()
    fixture.begin()
    fixture.set_gradient(0, gradient)
    assert (fixture.passed_to_python, fixture.counts, fixture.memory.sum()) == ([0], [0, 0, 0], 0)


def test_outside_of_a_pass_gradients_are_passed_to_python() -> None:
    """Before a pass, after it, and when an exception ended it."""
    fixture = _Fixture()
    fixture.set_gradient(0, torch.ones(3))
    fixture.begin()
    fixture.grad_hook.disable()
    fixture.set_gradient(0, torch.ones(3))
    fixture.begin()
    fixture.end = None
    fixture.set_gradient(0, torch.ones(3))
    assert (fixture.passed_to_python, fixture.counts) == ([0, 0, 0], [0, 0, 0])


def test_plain_gradients_are_gathered() -> None:
    """In the given order, without copies."""
    fixture = _Fixture(views=False)
    for parameter in fixture.parameters:
        parameter.grad = torch.ones(3)
    found = fixture.grad_hook.gather((2, 0))
    assert found is not None
    assert [id(each) for each in found] == [id(fixture.parameters[index].grad) for index in (2, 0)]


@pytest.mark.parametrize("odd", ["none", "strides", "shape", "derived", "frozen", "sparse", "shared", "overlapping"])
def test_gather_returns_none_for_unusual_gradients(odd: str) -> None:
    """One suffices: missing, other strides, requiring gradients itself, or sharing memory with another one."""
    fixture = _Fixture(views=False)
    flat = torch.ones(8)
    gradients = {
        "strides": torch.ones(6)[::2],
        "shape": torch.ones(4),
        "derived": torch.ones(3, requires_grad=True),
        "sparse": torch.ones(3).to_sparse(),
        "shared": flat[:3],
        "overlapping": flat[2:5],
    }
    fixture.parameters[0].grad = flat[:3]
    fixture.parameters[1].grad = torch.ones(3)
    if odd == "shape":
        fixture.parameters[1].data = torch.zeros(4)
        fixture.parameters[1].grad = gradients[odd]
    elif odd != "none":
        fixture.parameters[1].grad = gradients.get(odd, torch.ones(3))
    else:
        fixture.parameters[1].grad = None
    fixture.parameters[1].requires_grad_(odd != "frozen")
    assert fixture.grad_hook.gather((0, 1)) is None


def test_only_parameters_can_be_gathered() -> None:
    """An index out of range raises, and so does a value that is no index."""
    fixture = _Fixture(views=False)
    fixture.parameters[0].grad = torch.ones(3)
    with pytest.raises(IndexError):
        fixture.grad_hook.gather((0, 7))
    with pytest.raises(TypeError):
        fixture.grad_hook.gather(("no number",))  # type: ignore[arg-type]
