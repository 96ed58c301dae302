from __future__ import annotations

import pytest
import torch

from allhands import _core
from allhands.errors import AllhandsError
from allhands.groups import collectives
from allhands.training.ddp.bucket_memory import Bucket, BucketMemory, TensorList, tensor_lists, view_like


def make_parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """Return parameters of these shapes."""
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def make_buckets(*dtypes: torch.dtype) -> tuple[list[torch.nn.Parameter], list[Bucket]]:
    """Return parameters of three elements and their buckets, one for each."""
    given = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    return given, BucketMemory(given, [False] * len(given), None, [1]).arrange(list(range(len(given))))


def gather(tensors: TensorList, given: list[torch.nn.Parameter]) -> tuple[list[list[float]], list[int]]:
    """Return the values that a list contributes, and the positions of the gradients that were copied."""
    grad_hook = _core.GradHook(collectives.way(), tuple(given), lambda _: None, lambda: None)
    views = {part.position: part.view for part in tensors.parts}
    layouts = tuple(views[position] for position in range(len(given)))
    grad_hook.set_places((0,) * len(given), (None,) * len(given), layouts)
    found = tensors.gather(grad_hook, [f"p{position}" for position in range(len(given))], 0)
    return [each.view(-1).tolist() for each in found.tensors], [part.position for part in found.copied]


def test_views_have_the_strides_of_their_parameters() -> None:
    """Dense strides are kept (channels_last); others become those of a contiguous tensor."""
    memory = torch.arange(100.0)
    for tensor in (torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(4, 5).t()):
        view = view_like(memory, 4, tensor)
        assert view.stride() == tensor.stride()
        assert sorted(view.flatten().tolist()) == [4.0 + number for number in range(tensor.numel())]
    assert view_like(memory, 0, torch.empty(1, 3).expand(2, 3)).stride() == (3, 1)


def test_another_order_reuses_the_memory() -> None:
    """Rebuilding the buckets moves views and allocates nothing."""
    given = make_parameters((10, 10), (7,), (3, 3), ())
    memory = BucketMemory(given, [False] * 4, None, [64])
    before = {
        bucket.flat.untyped_storage().data_ptr() for bucket in memory.arrange([0, 1, 2, 3]) if bucket.flat is not None
    }
    buckets = memory.arrange([3, 1, 2, 0])
    assert {bucket.flat.untyped_storage().data_ptr() for bucket in buckets if bucket.flat is not None} == before
    for bucket in buckets:
        assert bucket.flat is not None
        assert bucket.counted is not None
        assert bucket.counted.numel() == bucket.flat.numel() + 1
        assert bucket.flat.numel() == sum(part.parameter.numel() for part in bucket.parts)


def test_order_of_tensor_lists() -> None:
    """One list per bucket, or merged per dtype with that of the last bucket last; the last gradients come first."""
    _, buckets = make_buckets(torch.float32, torch.float64, torch.float32)
    counter = torch.zeros(())
    merged = tensor_lists(buckets, counter, merge=True)
    assert [each.order for each in merged] == [(1,), (2, 0)]
    assert [each.counter for each in merged] == [None, counter]
    single = tensor_lists(buckets, counter, merge=False)
    assert [each.order for each in single] == [(0,), (1,), (2,)]
    assert [each.counter for each in single] == [None, None, counter]


def test_gradients_that_cannot_be_reduced_in_place_are_copied() -> None:
    """A missing gradient contributes zeros, one with other strides its values; the others are not copied."""
    given, buckets = make_buckets(*[torch.float32] * 4)
    tensors = tensor_lists(buckets, torch.ones(()), merge=True)[0]
    given[0].grad, given[1].grad, given[3].grad = torch.full((3,), 1.0), torch.arange(6.0)[::2], torch.full((3,), 3.0)
    values, copied = gather(tensors, given)
    assert values == [[3.0] * 3, [0.0] * 3, [0.0, 2.0, 4.0], [1.0] * 3, [1.0]]
    assert copied == [2, 1]
    assert [len(each) for each in values] == [each.numel() for each in tensors.zeros()]


def test_gradients_that_share_memory_are_copied() -> None:
    """In place, the average of one would be the input of the other."""
    given, buckets = make_buckets(torch.float32, torch.float32)
    flat = torch.ones(5)
    given[0].grad, given[1].grad = flat[:3], flat[2:]
    assert gather(tensor_lists(buckets, None, merge=True)[0], given) == ([[1.0] * 3] * 2, [1, 0])


def test_gradient_of_another_shape_is_named() -> None:
    """The module was changed after it was wrapped."""
    given, buckets = make_buckets(torch.float32, torch.float32)
    given[0].grad = torch.ones(3)
    given[1].data = torch.zeros(4)
    given[1].grad = torch.ones(4)
    with pytest.raises(AllhandsError, match="p1") as caught:
        gather(tensor_lists(buckets, None, merge=True)[0], given)
    assert caught.value.slug == "module-changed"
