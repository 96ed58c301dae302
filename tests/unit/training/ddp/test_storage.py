from __future__ import annotations

import torch

from allhands.training.ddp.storage import Storage, view_like


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


def test_all_buckets_of_a_type_can_be_taken_as_one() -> None:
    """It ends with the mark of its last bucket, and the type of the last bucket comes last; none beside sparse ones."""
    given = [*parameters((5,), (40,), (7,)), torch.nn.Parameter(torch.randn(4, dtype=torch.float64))]
    storage = Storage(given, [False] * 4, None, [64])
    for order in ([3, 0, 1, 2], [0, 3, 1, 2], [0, 1, 2, 3]):
        buckets = storage.arrange(order)
        for whole in storage.wholes:
            whole.zero_()
        for number, bucket in enumerate(buckets, 1):
            assert bucket.marked is not None
            bucket.marked.fill_(number)
        assert {whole.dtype for whole in storage.wholes} == {torch.float32, torch.float64}
        assert float(storage.wholes[-1][-1]) == len(buckets)
        assert sum(int((whole > 0).sum()) for whole in storage.wholes) == 5 + 40 + 7 + 4 + len(buckets)
    storage = Storage(given, [False, True, False, False], None, [64])
    storage.arrange([0, 1, 2, 3])
    assert storage.wholes == []
