from __future__ import annotations

import pytest
import torch
from hypothesis import given as with_given
from hypothesis import strategies as st

from allhands.errors import AllhandsError
from allhands.training.ddp.bucket import BucketMemory, assign

sizes = st.lists(st.tuples(st.integers(0, 5000), st.booleans(), st.booleans()), min_size=1, max_size=30)


def make_parameters(count: int) -> list[torch.nn.Parameter]:
    """Return parameters of three elements."""
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def test_views_have_the_strides_of_their_parameters() -> None:
    """Dense strides are kept (channels_last); others become those of a contiguous tensor."""
    tensors = [torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(4, 5).t()]
    given = [torch.nn.Parameter(each) for each in (*tensors, torch.empty(1, 3).expand(2, 3))]
    (bucket,) = BucketMemory(given, [False] * 3, None, [1 << 20]).arrange(range(3))
    assert bucket.flat is not None
    bucket.flat.copy_(torch.arange(float(bucket.flat.numel())))
    assert [part.view.stride() for part in bucket.parts] == [*(each.stride() for each in tensors), (3, 1)]
    assert sorted(value for part in bucket.parts for value in part.view.flatten().tolist()) == bucket.flat.tolist()


def test_buckets_are_closed_once_they_are_full() -> None:
    """Each bucket has its own cap, and gradients are assigned in the given order."""
    assert assign([torch.empty(100)] * 6, [False] * 6, [5, 4, 3, 2, 1, 0], [400, 800]) == [[5], [4, 3], [2, 1], [0]]


def test_kinds_do_not_share_and_sparse_ones_have_their_own() -> None:
    """A bucket has one dtype and device; open buckets follow in the order of their last gradient."""
    given = [torch.empty(1, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32, torch.float32)]
    assert assign(given, [False, False, True, False], range(4), [1 << 20]) == [[2], [1], [0, 3]]


@with_given(sizes, st.randoms(use_true_random=False), st.lists(st.integers(1, 30_000), min_size=1, max_size=3))
def test_every_gradient_has_one_place(items: list[tuple[int, bool, bool]], random: object, caps: list[int]) -> None:
    """In any order each gradient is in one bucket; buckets are apart, start on cache lines and reuse the memory."""
    given = [
        torch.nn.Parameter(torch.empty(numel, dtype=[torch.float32, torch.float64][wide])) for numel, wide, _ in items
    ]
    memory = BucketMemory(given, [sparse for *_, sparse in items], None, caps)
    used: set[int] = set()
    for _ in range(3):
        order = list(range(len(given)))
        random.shuffle(order)  # type: ignore[attr-defined]
        buckets = memory.arrange(order)
        assert sorted(part.position for bucket in buckets for part in bucket.parts) == sorted(order)
        assert [bucket.is_last() for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
        places = []
        for bucket in buckets:
            if bucket.flat is None:
                assert [items[part.position][2] for part in bucket.parts] == [True]
                continue
            assert {part.parameter.dtype for part in bucket.parts} == {bucket.flat.dtype}
            assert [part.view.shape for part in bucket.parts] == [part.parameter.shape for part in bucket.parts]
            assert bucket.flat.numel() == sum(part.parameter.numel() for part in bucket.parts)
            assert bucket.flat.storage_offset() * bucket.flat.itemsize % 64 == 0
            places.append((bucket.flat.data_ptr(), bucket.flat.nbytes))
            used.add(bucket.flat.untyped_storage().data_ptr())
        ends = [0]
        for start, size in sorted(place for place in places if place[1]):
            assert start >= ends[-1]
            ends.append(start + size)
    assert len(used) <= 2


def test_missing_and_strided_gradients_are_copied() -> None:
    """A missing gradient contributes zeros. The elements are in the order of reduction, the last gradient first."""
    given = make_parameters(4)
    (bucket,) = BucketMemory(given, [False] * 4, None, [1 << 20]).arrange(range(4))
    given[0].grad, given[1].grad, given[3].grad = torch.full((3,), 1.0), torch.arange(6.0)[::2], torch.full((3,), 3.0)
    bucket.fill(["a", "b", "c", "d"], 0)
    assert bucket.order == (3, 2, 1, 0)
    assert [each.tolist() for each in bucket.flats()] == [[3.0] * 3, [0.0] * 3, [0.0, 2.0, 4.0], [1.0] * 3]
    assert bucket.buffer().tolist() == [1.0] * 3 + [0.0, 2.0, 4.0] + [0.0] * 3 + [3.0] * 3
    assert [each.tolist() for each in bucket.zeros().flats()] == [[0.0] * 3] * 4


def test_gradient_of_another_shape_is_named() -> None:
    """The module was changed after it was wrapped."""
    given = make_parameters(2)
    (bucket,) = BucketMemory(given, [False] * 2, None, [1 << 20]).arrange(range(2))
    given[0].grad = torch.ones(3)
    given[1].data = torch.zeros(4)
    given[1].grad = torch.ones(4)
    with pytest.raises(AllhandsError, match="p1") as caught:
        bucket.fill(["p0", "p1"], 0)
    assert caught.value.slug == "module-changed"
