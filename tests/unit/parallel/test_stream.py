from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from allhands.errors import ArgumentError, GroupStateError, WorldError
from allhands.parallel import shard_iterable


class Numbers(IterableDataset[int]):
    """Numbers from 1000 times the epoch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin elsewhere."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Give the numbers."""
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.count))


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """Return the items of all lists in one."""
    return list(itertools.chain.from_iterable(lists))


@given(st.integers(0, 80), st.integers(1, 5), st.integers(1, 4), st.integers(0, 20), st.integers(1, 5))
def test_any_number_of_steps_is_a_prefix(count: int, world: int, size: int, steps: int, later: int) -> None:
    """After k steps the ranks have had the first items of the stream, and any number of ranks can go on from there."""
    taken: list[int] = []
    for rank in range(world):
        shard = shard_iterable(range(count), world, rank, batch_size=size)
        taken += [item for _, item in zip(range(steps * size), shard, strict=False)]
    start = min(count, steps * size * world)
    assert sorted(taken) == list(range(start))
    rest = flat(list(shard_iterable(range(count), later, rank, start=start)) for rank in range(later))
    assert sorted(taken + rest) == list(range(count))


@given(st.integers(0, 80), st.integers(1, 5), st.integers(1, 4))
def test_drop_last_makes_ranks_even(count: int, world: int, size: int) -> None:
    """With drop_last every rank has as many items, in whole batches."""
    shards = [list(shard_iterable(range(count), world, rank, batch_size=size, drop_last=True)) for rank in range(world)]
    assert {len(items) for items in shards} == {count // (size * world) * size}


def test_workers_give_the_batches_of_their_rank_in_turn() -> None:
    """With workers the loader gives, batch by batch, what it gives without, in every epoch, also where they stay."""

    def batches(rank: int, **kw: Any) -> list[list[list[int]]]:
        shard = shard_iterable(Numbers(23), 2, rank, batch_size=3)
        loader = DataLoader(shard, batch_size=3, **kw)
        found = []
        for epoch in range(2):
            shard.set_epoch(epoch)
            found.append([batch.tolist() for batch in loader])
        return found

    alone = [batches(rank) for rank in range(2)]
    assert [batches(rank, num_workers=2, persistent_workers=True) for rank in range(2)] == alone
    assert sorted(flat(flat(each[1] for each in alone))) == list(range(1000, 1023))


def test_arguments_that_make_no_sense() -> None:
    """A rank out of range, no group to ask, batches of nothing."""
    with pytest.raises(WorldError):
        shard_iterable([], 2, 2)
    with pytest.raises(GroupStateError):
        shard_iterable([])
    with pytest.raises(ArgumentError):
        shard_iterable([], 2, 0, batch_size=0)
