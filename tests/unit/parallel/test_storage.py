from __future__ import annotations

import torch

from allhands.parallel.storage import Storage, view_like


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """Return parameters of these shapes."""
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_views_have_the_strides_of_their_parameters() -> None:
    """Dense strides are kept (channels_last); others become those of a contiguous tensor."""
    memory = torch.arange(100.0)
    for tensor in (torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(4, 5).t()):
        view = view_like(memory, 4, tensor)
        assert view.stride() == tensor.stride()
        assert sorted(view.flatten().tolist()) == [4.0 + number for number in range(tensor.numel())]
    assert view_like(memory, 0, torch.empty(1, 3).expand(2, 3)).stride() == (3, 1)


def test_another_order_takes_the_same_memory() -> None:
    """Rebuilding the buckets moves views, and allocates nothing."""
    given = parameters((10, 10), (7,), (3, 3), ())
    storage = Storage(given, [False] * 4, None, [64])
    before = {
        bucket.flat.untyped_storage().data_ptr() for bucket in storage.arrange([0, 1, 2, 3]) if bucket.flat is not None
    }
    buckets = storage.arrange([3, 1, 2, 0])
    assert {bucket.flat.untyped_storage().data_ptr() for bucket in buckets if bucket.flat is not None} == before
    for bucket in buckets:
        assert bucket.flat is not None
        assert bucket.marked is not None
        assert bucket.marked.numel() == bucket.flat.numel() + 1
        assert bucket.flat.numel() == sum(slot.parameter.numel() for slot in bucket.slots)
