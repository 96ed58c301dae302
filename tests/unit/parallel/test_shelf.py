"""Two ranks average gradients as they come: who comes first lays, the second averages, and what is left is the same."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import threads
from allhands import _core, collectives


class _End:
    """What is called at the end of a pass."""


class _Rank:
    """One end of a shelf: its parameters, and what takes their gradients."""

    def __init__(self, window: _core.Window, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.hooks: tuple[dict[int, object], ...] = tuple({0: None} for _ in shapes)
        self.shelf = _core.Shelf(window, tuple(each.nbytes for each in self.parameters), self.hooks)
        likes = tuple(torch.zeros_like(each) for each in self.parameters)
        self.unusual: list[int] = []
        self.intake = _core.Intake(collectives.way(), tuple(self.parameters), self.unusual.append, lambda: None)
        self.intake.arrange((0,) * len(shapes), None, likes)
        self.end = _End()

    def begin(self, *, shelved: bool = True) -> None:
        """Let a pass begin."""
        number = len(self.parameters)
        books = ([0] * number, [number], [0] * number, [1] * number)
        self.intake.begin(weakref.ref(self.end), *books, self.shelf if shelved else None)

    def give(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Let a gradient come; return it."""
        self.parameters[index].grad = gradient
        self.intake.came(index, self.parameters[index])
        return gradient


@contextmanager
def _pair(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Iterator[list[_Rank]]:
    sizes = tuple(torch.zeros(shape, dtype=dtype).nbytes for shape in shapes)
    stride = (_core.Shelf.bytes_for(sizes) // 2 // 4096 + 1) * 4096
    with threads.segments(2, 1 << 16) as views:
        descriptor = os.memfd_create("window")
        try:
            os.ftruncate(descriptor, 2 * stride)
            yield [_Rank(_core.Window(view, descriptor, stride), shapes, dtype) for view in views]
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 1])
def test_whoever_comes_second_averages(first: int, dtype: torch.dtype) -> None:
    """Its gradient is the average at once; that of the first when it looks next, or at the end."""
    torch.manual_seed(1)
    shape = (300, 301)
    with _pair([shape, (5,)], dtype) as ranks:
        ours, theirs = ranks[first], ranks[1 - first]
        for turn in range(3):
            own = [torch.randn(shape, dtype=dtype), torch.randn(5, dtype=dtype)]
            other = [torch.randn(shape, dtype=dtype), torch.randn(5, dtype=dtype)]
            # Halves are summed in 32 bits and rounded once.
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            wanted = [((a.to(wide) + b.to(wide)) / 2).to(dtype) for a, b in zip(own, other, strict=True)]
            for rank in ranks:
                rank.begin()
            laid = ours.give(0, own[0].clone())
            assert torch.equal(laid, own[0])
            assert torch.equal(theirs.give(0, other[0].clone()), wanted[0])
            assert torch.equal(laid, own[0])
            small = ours.give(1, own[1].clone())
            assert torch.equal(laid, wanted[0]), "the next gradient takes the average of the last"
            theirs.give(1, other[1].clone())
            assert [len(rank.shelf) for rank in ranks] == [2, 2]
            if turn:
                ours.shelf.settle()
                assert torch.equal(small, wanted[1])
            assert [rank.shelf.end() for rank in ranks] == [(), ()]
            assert torch.equal(small, wanted[1])
            assert not any(len(rank.shelf) or rank.shelf.has(0) or rank.unusual for rank in ranks)


def test_a_gradient_of_another_size_is_left_alone() -> None:
    """Not a byte beside it is read or written: it does not come on the shelf, and goes at the end on both ranks."""
    with _pair([(10,)]) as ranks:
        for rank in ranks:
            memory = torch.arange(40.0)
            rank.parameters[0].data = torch.zeros(40)
            rank.intake.arrange((0,), None, (torch.zeros(40),))
            rank.begin()
            rank.give(0, memory)
            assert not rank.shelf.has(0)
            assert torch.equal(memory, torch.arange(40.0))
        assert [rank.shelf.end() for rank in ranks] == [(0,), (0,)]


def test_what_only_one_rank_has_is_left_on_both() -> None:
    """Whether it was laid there or not; the next round is none the worse."""
    with _pair([(10,), (10,), (10,)]) as (first, second):
        for _ in range(3):
            first.begin()
            second.begin()
            laid = first.give(0, torch.ones(10))
            second.give(1, torch.ones(10))
            assert first.shelf.has(0)
            assert not first.shelf.has(1)
            first.shelf.settle()
            assert (first.shelf.end(), second.shelf.end()) == ((0, 1, 2), (0, 1, 2))
            assert laid.tolist() == [1.0] * 10
        first.begin()
        second.begin()
        for index in range(3):
            first.give(index, torch.zeros(10))
            second.give(index, torch.ones(10))
        assert (second.shelf.end(), first.shelf.end()) == ((), ())
        assert [each.grad.tolist() for each in first.parameters if each.grad is not None] == [[0.5] * 10] * 3


def test_a_rank_that_is_ahead_by_a_round_touches_nothing_of_the_last() -> None:
    """What the other has not taken yet is left to the end of the new round."""
    with _pair([(10,)]) as (first, second):
        first.begin()
        second.begin()
        laid = first.give(0, torch.zeros(10))
        second.give(0, torch.ones(10))
        assert second.shelf.end() == ()
        second.begin()
        ahead = second.give(0, torch.full((10,), 7.0))
        assert first.shelf.end() == ()
        assert laid.tolist() == [0.5] * 10
        first.begin()
        first.give(0, torch.full((10,), 3.0))
        assert (first.shelf.end(), second.shelf.end()) == ((0,), (0,))
        assert ahead.tolist() == [7.0] * 10


@pytest.mark.parametrize(("mib", "left"), [(2, ()), (6, ()), (12, (0,))])
def test_a_gradient_that_is_larger_than_the_shelf_is_shared(mib: int, left: tuple[int, ...]) -> None:
    """Each lays what finds room, and averages what the other laid; if that is not all, the rest is left as it was."""
    count = mib << 18
    with _pair([(count,)]) as (first, second):
        for _ in range(2):
            first.begin()
            second.begin()
            own, other = torch.arange(count).float(), torch.ones(count)
            one, two = first.give(0, own.clone()), second.give(0, other.clone())
            first.shelf.settle()
            second.shelf.settle()
            assert first.shelf.end() == second.shelf.end() == left
            averaged = one == (own + other) / 2
            assert torch.equal(one[averaged], two[averaged])
            assert torch.equal(one[~averaged], own[~averaged])
            assert torch.equal(two[~averaged], other[~averaged])
            assert averaged.sum() >= min(mib, 8) << 18


def test_who_stays_away() -> None:
    """A parameter with a hook of someone else's, one that is left out, and what is not plain, go at the end."""
    shapes = [(4, 4)] * 6
    with _pair(shapes) as (first, second):
        first.hooks[0][1] = None
        first.shelf.leave_out(1)
        first.begin()
        second.begin()
        memory = torch.zeros(24)
        strided, derived = torch.zeros(4, 8)[:, ::2], torch.zeros(4, 4, requires_grad=True)
        overlapping = [memory[:16].view(4, 4), memory[8:].view(4, 4)]
        gradients = [torch.zeros(4, 4), torch.zeros(4, 4), strided, derived, *overlapping]
        for index, gradient in enumerate(gradients):
            first.give(index, gradient)
            second.give(index, torch.ones(4, 4))
        assert [first.shelf.has(index) for index in range(6)] == [False] * 4 + [True, False]
        first.shelf.settle()
        assert first.shelf.end() == second.shelf.end() == (0, 1, 2, 3, 5)
        assert memory.tolist() == [0.5] * 16 + [0.0] * 8


def test_a_pass_without_the_shelf_leaves_everything() -> None:
    """Also where the other rank lays its own there."""
    with _pair([(10,)]) as (first, second):
        first.begin(shelved=False)
        second.begin()
        first.give(0, torch.zeros(10))
        second.give(0, torch.ones(10))
        assert (first.shelf.end(), second.shelf.end()) == ((0,), (0,))


def test_wrong_arguments_are_refused() -> None:
    """A shelf needs a window of two ranks with room for all, and a dict for each size."""
    with threads.segments(2, 1 << 16) as views, threads.segments(3, 1 << 16) as three:
        descriptor = os.memfd_create("window")
        os.ftruncate(descriptor, 3 * 4096)
        window, other = _core.Window(views[0], descriptor, 4096), _core.Window(three[0], descriptor, 4096)
        os.close(descriptor)
        wrong = [(window, (1 << 20,), ({},)), (other, (8,), ({},)), (window, (8,), ()), (window, (8,), (1,))]
        for given in [*wrong, (views[0], (8,), ({},))]:
            with pytest.raises(ValueError, match="Shelf"):
                _core.Shelf(*given)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            _core.Shelf.bytes_for([1])  # type: ignore[arg-type]
        shelf = _core.Shelf(window, (8,), ({},))
        with pytest.raises(IndexError, match="no such"):
            shelf.leave_out(1)
        assert not shelf.has(1)
