from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import DistributedSampler as TorchSampler

from allhands.errors import ArgumentError, GroupStateError, WorldError
from allhands.training import DistributedSampler, LengthGroupedBatches

LENGTHS = st.integers(0, 60)
WORLDS = st.integers(1, 7)


def step(samplers: list[Any], batch: int) -> list[Any]:
    """Return the items of all ranks in one step of ``batch`` items each."""
    return [item for iterator in samplers for item in [value for _, value in zip(range(batch), iterator, strict=False)]]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """Return the items of all lists in one."""
    return list(itertools.chain.from_iterable(lists))


@given(st.integers(1, 60), WORLDS, st.booleans(), st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_default_indices_are_those_of_torch(  # noqa: PLR0917  # what hypothesis draws
    length: int, world: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    """With torch's arguments, every rank has torch's indices, length and total size in every epoch."""
    for rank in range(world):
        arguments = (range(length), world, rank, shuffle, seed, drop_last)
        theirs, ours = TorchSampler(*arguments), DistributedSampler(*arguments)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


@settings(max_examples=500)
@given(
    LENGTHS,
    st.lists(st.tuples(WORLDS, st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
)
def test_each_sample_once_after_resuming(
    length: int, lives: list[tuple[int, int, int]], shuffle: bool, epochs: int
) -> None:
    """Killed after any number of steps and resumed by any number of ranks: each epoch has each sample exactly once."""
    state = None
    seen: dict[int, list[int]] = {}
    for number, (world, batch, steps) in enumerate(lives):
        samplers = [DistributedSampler(range(length), world, rank, shuffle, pad=False) for rank in range(world)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        last, left = number == len(lives) - 1, steps
        while samplers[0].epoch < epochs:
            epoch = samplers[0].epoch
            iterators = [iter(sampler) for sampler in samplers]
            while (last or left) and (taken := step(iterators, batch)):
                left -= 1
                seen.setdefault(epoch, []).extend(taken)
            state = samplers[0].state_dict()
            if state["epoch"] == epoch:
                break  # killed in the middle
            for sampler in samplers:
                sampler.set_epoch(epoch + 1)
    assert {epoch: sorted(items) for epoch, items in seen.items() if items} == (
        {epoch: list(range(length)) for epoch in range(epochs)} if length else {}
    )


@given(st.integers(1, 60), WORLDS, WORLDS, st.integers(0, 20))
def test_padding_is_at_the_end(length: int, world: int, later: int, steps: int) -> None:
    """With padding, a resumed epoch has each sample once, and then the padding for its number of ranks."""
    samplers = [DistributedSampler(range(length), world, rank) for rank in range(world)]
    taken = [item for _, *items in zip(range(steps), *samplers, strict=False) for item in items]
    state = samplers[0].state_dict()
    if state["epoch"]:
        assert set(taken) == set(range(length))
        return
    resumed = [DistributedSampler(range(length), later, rank) for rank in range(later)]
    for sampler in resumed:
        sampler.load_state_dict(state)
    rest = [list(sampler) for sampler in resumed]
    assert len({len(items) for items in rest}) == 1
    assert len(rest[0]) == -(-(length - len(taken)) // later)
    assert sorted({*taken, *flat(rest)}) == list(range(length))
    assert len(taken) + sum(map(len, rest)) < length + later


@pytest.mark.parametrize("length", [0, 1, 10, 11])
def test_each_sample_once_without_padding(length: int) -> None:
    """With pad=False each item is on one rank; the first ranks have at most one more, as their length says."""
    samplers = [DistributedSampler(range(length), 4, rank, pad=False) for rank in range(4)]
    sizes = [len(sampler) for sampler in samplers]
    given = [list(sampler) for sampler in samplers]
    assert sorted(flat(given)) == list(range(length))
    assert [len(items) for items in given] == sizes
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_epochs_advance_without_set_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Without set_epoch the order is not repeated, and rank 0 logs this once. With advance=False it is, as in torch."""
    import allhands.training.data.sampler as module

    module._warned = False
    sampler = DistributedSampler(range(50), 2, 0)
    reference = TorchSampler(range(50), 2, 0)
    with caplog.at_level(logging.WARNING, "allhands"):
        passes = [list(sampler) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "set_epoch was not called" in caplog.text
    for epoch, items in enumerate(passes):
        reference.set_epoch(epoch)
        assert items == list(reference)
    caplog.clear()
    same = DistributedSampler(range(50), 2, 0, advance=False)
    plain = DistributedSampler(range(50), 2, 0, shuffle=False)
    assert list(same) == list(same)
    assert list(plain) == list(plain)
    assert caplog.text == ""


def test_epochs_before_a_loaded_state_are_empty() -> None:
    """A loop that counts epochs from 0 continues at the position of the state, which never decreases."""
    first = DistributedSampler(range(20), 2, 0, pad=False)
    first.set_epoch(2)
    for _, _ in zip(range(3), first, strict=False):
        pass
    state = first.state_dict()
    assert (state["epoch"], state["position"]) == (2, 6)
    again = [DistributedSampler(range(20), 3, rank, pad=False) for rank in range(3)]
    passes = []
    for sampler in again:
        sampler.load_state_dict(state)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            before = sampler.state_dict()
            assert (before["epoch"], before["position"]) >= (2, 6)
            passes.append((epoch, list(sampler)))
    sizes = {epoch: sum(len(items) for at, items in passes if at == epoch) for epoch in range(4)}
    assert sizes == {0: 0, 1: 0, 2: 14, 3: 20}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_prefetched_items_are_not_consumed(workers: int, persistent: bool) -> None:
    """The state counts the batches that the loop received, with and without workers, and after a break."""
    sampler = DistributedSampler(range(40), 2, 0)
    loader = DataLoader(
        torch.arange(40), batch_size=3, sampler=sampler, num_workers=workers, persistent_workers=persistent
    )
    for epoch in range(2):
        for number, _ in enumerate(loader, 1):
            state = sampler.state_dict()
            expected = (epoch, number * 6) if number < 7 else (epoch + 1, 0)
            assert (state["epoch"], state["position"]) == expected
        assert sampler.state_dict()["epoch"] == epoch + 1
        sampler.set_epoch(epoch + 1)
    for number, _ in enumerate(loader, 1):
        if number == 2:
            break
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (2, 12)
    assert sampler.state_dict(consumed=5)["position"] == 10


def test_batch_dropped_by_the_loader_completes_the_epoch() -> None:
    """With the loader's drop_last the epoch is complete when the loop ends, although items were left."""
    sampler = DistributedSampler(range(11), 1, 0)
    for _ in DataLoader(torch.arange(11), batch_size=4, sampler=sampler, drop_last=True):
        pass
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


class Own(Sampler[int]):
    """A sampler that uses Python's unseeded random module."""

    def __iter__(self) -> Any:
        """Give ten indices in random order."""
        return iter(random.sample(range(10), 10))  # not for secrets


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(10)),
        lambda: RandomSampler(range(10), generator=torch.Generator().manual_seed(random.randrange(100))),  # noqa: S311
        lambda: SequentialSampler(range(10)),
        Own,
    ],
)
def test_any_sampler_can_be_wrapped(make: Any) -> None:
    """The ranks' copies of a sampler are divided as one: each item once, another order each epoch, resumable."""
    state = random.getstate(), torch.get_rng_state()
    ranks = [DistributedSampler(make(), 3, rank, pad=False) for rank in range(3)]
    for _ in range(2):
        assert sorted(flat(list(sampler) for sampler in ranks)) == list(range(10))
        for sampler in ranks:
            sampler.set_epoch(sampler.epoch + 1)
    taken = [next(iter(sampler)) for sampler in ranks]
    rest = DistributedSampler(make(), 1, 0)
    rest.load_state_dict(ranks[0].state_dict())
    assert sorted(taken + list(rest)) == list(range(10))
    if make is Own:
        assert random.getstate() == state[0]
        with pytest.raises(TypeError, match="length"):
            len(DistributedSampler(make(), 2, 0))
    torch.manual_seed(0)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    list(ranks[0])
    assert torch.equal(torch.rand(1), drawn)


def test_batch_sampler_can_be_wrapped() -> None:
    """Whole batches are divided, for a DataLoader's batch_sampler; the state counts batches."""
    batches = [
        DistributedSampler(BatchSampler(RandomSampler(range(20)), 3, False), 2, rank, pad=False) for rank in (0, 1)
    ]
    loaders = [DataLoader(torch.arange(20), batch_sampler=sampler, num_workers=0) for sampler in batches]
    seen = [[batch.tolist() for batch in loader] for loader in loaders]
    assert sorted(flat(flat(seen))) == list(range(20))
    assert [len(each) for each in seen] == [4, 3]
    batches[0].set_epoch(1)
    next(iter(loaders[0]))
    assert batches[0].state_dict()["position"] == 2


def test_weights() -> None:
    """Items are drawn by weight: never with weight 0, more often with more weight, the same on all ranks."""
    weights = [0.0, 1.0, 3.0, 0.0]
    ranks = [DistributedSampler(range(4), 2, rank, weights=weights, draws=4000) for rank in range(2)]
    drawn = flat(list(sampler) for sampler in ranks)
    assert len(drawn) == 4000
    assert set(drawn) == {1, 2}
    assert 2700 < drawn.count(2) < 3300
    once = DistributedSampler(range(4), 1, 0, weights=[1, 0, 5, 1e9], draws=3, replacement=False)
    firsts = []
    for epoch in range(20):
        once.set_epoch(epoch)
        found = list(once)
        assert sorted(found) == [0, 2, 3]
        firsts.append(found[0])
    assert set(firsts) == {3}


@pytest.mark.parametrize(
    "arguments",
    [
        {"weights": [1, 2]},
        {"weights": [1, -1, 1]},
        {"weights": [0, 0, 0]},
        {"weights": [1, 0, 1], "replacement": False},
        {"weights": [1, float("nan"), 1]},
    ],
)
def test_invalid_weights(arguments: dict[str, Any]) -> None:
    """Weights that are too few, negative, all zero or not finite raise an error."""
    with pytest.raises(ArgumentError):
        DistributedSampler(range(3), 1, 0, **arguments)


def test_invalid_arguments_and_states() -> None:
    """A rank out of range, no group, a state of other data or of another version raise an error."""
    with pytest.raises(WorldError):
        DistributedSampler(range(3), 2, 2)
    with pytest.raises(GroupStateError):
        DistributedSampler(range(3))
    sampler = DistributedSampler(range(3), 1, 0)
    with pytest.raises(ArgumentError, match="4 items"):
        sampler.load_state_dict(DistributedSampler(range(4), 1, 0).state_dict())
    with pytest.raises(ArgumentError, match="version"):
        sampler.load_state_dict({"epoch": 1})


@given(st.lists(st.integers(1, 500), max_size=200), st.integers(1, 9), WORLDS, st.integers(0, 3))
def test_length_grouped_batches_hold_each_item_once(lengths: list[int], size: int, world: int, epoch: int) -> None:
    """Every item is in one batch of at most the size; adjacent batches have similar lengths, the longest first."""
    batches = LengthGroupedBatches(lengths, size)
    ranks = [DistributedSampler(batches, world, rank, pad=False) for rank in range(world)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    given = [list(sampler) for sampler in ranks]
    assert sorted(flat(flat(given))) == list(range(len(lengths)))
    assert all(len(batch) <= size for items in given for batch in items)
    if lengths:
        assert max(lengths) == max(lengths[index] for index in given[0][0])
    least = LengthGroupedBatches(lengths, size, most=500)
    assert all(len(batch) * max(lengths[index] for index in batch) <= 500 for batch in least)


def test_length_grouping_pads_little() -> None:
    """For random lengths, grouped batches have a fraction of the padding of random batches."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 1000, (4000,)).tolist()

    def padding(batches: Any) -> float:
        spans = [[lengths[index] for index in batch] for batch in batches]
        return sum(max(span) * len(span) - sum(span) for span in spans) / sum(lengths)

    grouped = list(LengthGroupedBatches(lengths, 16))
    assert padding(grouped) < 0.1 * padding(BatchSampler(RandomSampler(lengths), 16, False))
    with pytest.raises(ArgumentError, match="fits into no batch"):
        LengthGroupedBatches([3, 9], 2, most=8)
