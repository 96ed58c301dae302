from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from allhands.errors import ArgumentError, GroupStateError, WorldError
from allhands.training import shard_iterable


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
    """After k steps the ranks have had the first items of the stream; any number of ranks can continue from there."""
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
    """With drop_last every rank has the same number of items, in whole batches."""
    shards = [list(shard_iterable(range(count), world, rank, batch_size=size, drop_last=True)) for rank in range(world)]
    assert {len(items) for items in shards} == {count // (size * world) * size}


def test_workers_alternate_batches_of_their_rank() -> None:
    """With workers, persistent or not, the loader returns the same batches as without, in every epoch."""

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


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(1, 4))
def test_state_counts_items_the_loop_received(count: int, world: int, size: int, steps: int, later: int) -> None:
    """Items that the loop received are not repeated with any number of ranks; the next epoch is whole."""
    taken: list[int] = []
    states = []
    for rank in range(world):
        shard = shard_iterable(Numbers(count), world, rank, batch_size=size)
        shard.set_epoch(1)
        loader = iter(DataLoader(shard, batch_size=size))
        taken += flat(batch.tolist() for batch in itertools.islice(loader, steps))
        states.append(shard.state_dict())
    rest, next_epoch = [], []
    for rank in range(later):
        shard = shard_iterable(Numbers(count), later, rank, batch_size=2)
        shard.load_state_dict(states[0])
        # The loop counts from 0, as it did when it began.
        for epoch, found in ((0, rest), (1, rest), (2, next_epoch)):
            shard.set_epoch(epoch)
            found += list(shard)
    assert sorted(taken + rest) == list(range(1000, 1000 + count))
    assert sorted(next_epoch) == list(range(2000, 2000 + count))


def test_state_with_workers_needs_consumed() -> None:
    """Workers prefetch: the state needs `consumed`, and persistent workers continue from a loaded state."""
    shard = shard_iterable(Numbers(24), 2, 1, batch_size=3)
    assert shard.state_dict() == {"version": 1, "epoch": 0, "position": 0}
    loader = DataLoader(shard, batch_size=3, num_workers=2, persistent_workers=True)
    first = next(batches := iter(loader)).tolist()
    with pytest.raises(ArgumentError, match="consumed=steps"):
        shard.state_dict()
    state = shard.state_dict(consumed=3)
    assert state["position"] == 6
    list(batches)
    shard.load_state_dict(state)
    assert first == [3, 4, 5]
    assert [batch.tolist() for batch in loader] == [[9, 10, 11], [15, 16, 17], [21, 22, 23]]
    with pytest.raises(ArgumentError, match="version"):
        shard.load_state_dict({})


def test_invalid_arguments() -> None:
    """A rank out of range, no group, a batch size of 0."""
    with pytest.raises(WorldError):
        shard_iterable([], 2, 2)
    with pytest.raises(GroupStateError):
        shard_iterable([])
    with pytest.raises(ArgumentError):
        shard_iterable([], 2, 0, batch_size=0)
