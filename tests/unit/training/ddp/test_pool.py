"""Results that lie once in memory for all ranks, with threads as ranks: each sees them as its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import threads
from allhands import _core
from allhands.engines.shm import engine as shm
from allhands.groups import collectives

LIMIT_NS = 20_000_000_000
SHAPES: list[tuple[int, ...]] = [(70, 300), (3,), (), (5, 7, 11), (40_000,)]


class _Rank:
    """One end of a pool: its parameters, their gradients, and the cell."""

    def __init__(self, segment: _core.Segment, descriptor: int, likes: tuple[torch.Tensor, ...], rank: int) -> None:
        self.segment = segment
        self.pool = _core.Pool(collectives.way(), segment, descriptor, likes)
        self.parameters = tuple(torch.nn.Parameter(torch.empty_like(like)) for like in likes)
        self.cell = torch.frombuffer(self.pool, dtype=likes[0].dtype, count=1)[0]
        self._rank = rank

    def fill(self, call: int) -> list[torch.Tensor]:
        """Give every parameter a gradient; return copies of them."""
        made = torch.Generator().manual_seed(call * 100 + self._rank)
        for each in self.parameters:
            each.grad = torch.empty_like(each.detach())
            each.grad.copy_(torch.randn(each.shape, generator=made))
        self.cell.fill_(self._rank + 1)
        return [each.grad.clone() for each in self.parameters if each.grad is not None]

    def average(self) -> None:
        """Do the call."""
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        told = self.segment.all_reduce_bundle(
            shm.parts([*gradients, self.cell]),
            shm.DTYPES[self.cell.dtype],
            shm.REDUCTIONS[torch.distributed.ReduceOp.AVG],
            LIMIT_NS,
        )
        assert told == 0


@contextmanager
def _group(ranks: int, dtype: torch.dtype = torch.float32, hands: int = 0) -> Iterator[list[_Rank]]:
    likes = tuple(torch.empty(shape, dtype=dtype) for shape in SHAPES)
    # One with strides of its own, as weights of convolutions have.
    likes = (*likes, torch.empty(2, 8, 5, 5, dtype=dtype).to(memory_format=torch.channels_last))
    sizes = (*(like.nbytes for like in likes), likes[0].element_size())
    with threads.segments(ranks, 1 << 16, hands=hands) as views:
        descriptor = os.memfd_create("pool")
        try:
            os.ftruncate(descriptor, _core.Pool.bytes_for(sizes, ranks))
            yield [_Rank(view, descriptor, likes, rank) for rank, view in enumerate(views)]
        finally:
            os.close(descriptor)


def _gradients(rank: _Rank) -> list[torch.Tensor]:
    return [each.grad for each in rank.parameters if each.grad is not None]


def _pass(ranks: list[_Rank], call: int, *, offering: int | None = None) -> tuple[list[torch.Tensor], list[bool]]:
    """Let all ranks, or the first ``offering``, offer their pools; return the averages and whose went there."""
    given = [each.fill(call) for each in ranks]
    wide = torch.float64 if given[0][0].dtype is torch.float64 else torch.float32
    wanted = []
    for parts in zip(*given, strict=True):
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        wanted.append((total / len(ranks)).to(parts[0].dtype))
    went = [False] * len(ranks)

    def work(rank: int) -> None:
        if offering is None or rank < offering:
            ranks[rank].pool.offer()
        ranks[rank].average()
        went[rank] = ranks[rank].pool.give(ranks[rank].parameters)

    threads.together(len(ranks), work)
    return wanted, went


@pytest.mark.parametrize(("ranks", "hands"), [(2, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averages_are_there_once(ranks: int, hands: int, dtype: torch.dtype) -> None:
    """Every rank has the same bits, shapes and strides, in one piece of memory; the cell has its own result."""
    with _group(ranks, dtype, hands) as group:
        for call in range(3):
            assert all(each.pool.is_clean() for each in group)
            wanted, went = _pass(group, call)
            assert all(went)
            for each in group:
                for parameter, gradient, want in zip(each.parameters, _gradients(each), wanted, strict=True):
                    assert torch.equal(gradient, want)
                    assert gradient.stride() == parameter.stride()
                del gradient
                assert each.cell.item() == (ranks + 1) / 2
                assert not each.pool.is_free()
                # A storage of its own, so that saving one does not save all.
                assert _gradients(each)[0].untyped_storage().nbytes() == each.parameters[0].nbytes
                for parameter in each.parameters:
                    parameter.grad = None
                assert each.pool.is_free()


def test_one_rank_that_does_not_offer_it() -> None:
    """All gradients are averaged where they lie then, on every rank."""
    with _group(3) as group:
        for call, offering in enumerate((2, 0, None, 1)):
            wanted, went = _pass(group, call, offering=offering)
            assert went == [offering is None] * 3
            for each in group:
                for gradient, want in zip(_gradients(each), wanted, strict=True):
                    assert torch.equal(gradient, want)


@pytest.mark.parametrize("known", [True, False], ids=["by torch", "behind its back"])
def test_what_a_rank_writes_is_its_own(known: bool) -> None:
    """Nobody else sees it, it stays until it is let go of, and is noticed and forgotten before the next results."""
    with _group(2) as group:
        wanted, _ = _pass(group, 0)
        mine = _gradients(group[1])[0]
        if known:
            mine.mul_(2)
        else:
            ctypes.memset(mine.data_ptr(), 0, mine.nbytes)
        assert torch.equal(mine, 2 * wanted[0] if known else torch.zeros_like(mine))
        assert torch.equal(_gradients(group[0])[0], wanted[0])
        del mine
        for each in group:
            each.fill(1)
        assert group[0].pool.is_clean()
        assert not group[1].pool.is_clean()
        # Once it was noticed, the page is the pool's again.
        assert group[1].pool.is_clean()
        wanted, went = _pass(group, 1)
        assert all(went)
        assert torch.equal(_gradients(group[1])[0], wanted[0])


def test_results_outlive_the_pool() -> None:
    """A gradient that somebody keeps stays as it is, whatever becomes of the pool, of the ranks and of the others."""
    with _group(2) as group:
        wanted, _ = _pass(group, 0)
        kept = _gradients(group[0])
        view = kept[0][3:]
        for each in group:
            each.fill(1)
        assert not group[0].pool.is_free()
        assert not group[0].pool.is_clean()
        group[0].pool.close()
        group[1].pool.close()
        assert not group[0].pool.is_free()
        # The cell is still there, and a call that has it goes as ever.
        wanted_next, went = _pass(group, 2)
        assert not any(went)
        assert torch.equal(_gradients(group[1])[0], wanted_next[0])
    del group
    for gradient, want in zip(kept, wanted, strict=True):
        assert torch.equal(gradient, want)
    del kept
    assert torch.equal(view, wanted[0][3:])


def test_a_bundle_of_other_sizes_is_not_meant_for_it() -> None:
    """Its tensors are reduced where they lie, though the cell is the last of them and the pool was offered."""
    with _group(2) as group:

        def work(rank: int) -> None:
            tensor = torch.full((60_000,), float(rank))
            group[rank].cell.fill_(rank)
            group[rank].pool.offer()
            code = group[rank].segment.all_reduce_bundle(
                shm.parts([tensor, group[rank].cell]), shm.DTYPES[torch.float32], 1, LIMIT_NS
            )
            assert code == 0
            assert torch.equal(tensor, torch.ones(60_000))
            assert group[rank].cell.item() == 1
            assert not group[rank].pool.give(group[rank].parameters)

        threads.together(2, work)


def test_what_makes_no_pool() -> None:
    """Arguments that are none, and as many parameters as there are results."""
    with _group(2) as group:
        for given in ((1, 2, 3, ()), (collectives.way(), group[0].segment, 0, ())):
            with pytest.raises(TypeError):
                _core.Pool(*given)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            group[0].pool.give(group[0].parameters[:-1])
        with pytest.raises(OSError, match="Bad file descriptor"):
            _core.Pool(collectives.way(), group[0].segment, -1, (torch.ones(3),))
