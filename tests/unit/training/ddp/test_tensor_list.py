"""Which gradients are reduced together where they lie, and what stands in for those that cannot be."""

from __future__ import annotations

import pytest
import torch

from allhands import _core
from allhands.errors import AllhandsError
from allhands.groups import collectives
from allhands.training.ddp.storage import Bucket, Storage
from allhands.training.ddp.tensor_list import Bundle, tie


def made(*dtypes: torch.dtype) -> tuple[list[torch.nn.Parameter], list[Bucket]]:
    """Return parameters of three elements and their buckets, one for each."""
    given = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    return given, Storage(given, [False] * len(given), None, [1]).arrange(list(range(len(given))))


def gather(bundle: Bundle, given: list[torch.nn.Parameter]) -> tuple[list[list[float]], list[int]]:
    """Return the values of what a bundle gives, and the numbers of the gradients that were moved."""
    intake = _core.Intake(collectives.way(), tuple(given), lambda _: None, lambda: None)
    views = {slot.position: slot.view for slot in bundle.slots}
    intake.arrange((0,) * len(given), (None,) * len(given), tuple(views[index] for index in range(len(given))))
    found = bundle.gather(intake, [f"p{index}" for index in range(len(given))], 0)
    return [each.view(-1).tolist() for each in found.tensors], [slot.position for slot in found.moved]


def test_the_last_come_first_and_the_mark_goes_last() -> None:
    """Together there is a bundle for each type, that of the last bucket last; else one for each bucket."""
    _, buckets = made(torch.float32, torch.float64, torch.float32)
    mark = torch.zeros(())
    together = tie(buckets, mark, together=True)
    assert [each.order for each in together] == [(1,), (2, 0)]
    assert [each.mark for each in together] == [None, mark]
    apart = tie(buckets, mark, together=False)
    assert [each.order for each in apart] == [(0,), (1,), (2,)]
    assert [each.mark for each in apart] == [None, None, mark]


def test_what_cannot_stay_lies_in_its_bucket() -> None:
    """A missing gradient gives zeros, one with other strides its values; the others stay where they are."""
    given, buckets = made(*[torch.float32] * 4)
    bundle = tie(buckets, torch.ones(()), together=True)[0]
    given[0].grad, given[1].grad, given[3].grad = torch.full((3,), 1.0), torch.arange(6.0)[::2], torch.full((3,), 3.0)
    values, moved = gather(bundle, given)
    assert values == [[3.0] * 3, [0.0] * 3, [0.0, 2.0, 4.0], [1.0] * 3, [1.0]]
    assert moved == [2, 1]
    assert [len(each) for each in values] == [each.numel() for each in bundle.zeros()]


def test_gradients_that_share_memory_all_lie_in_buckets() -> None:
    """Otherwise what one of them becomes would be what the other one was."""
    given, buckets = made(torch.float32, torch.float32)
    flat = torch.ones(5)
    given[0].grad, given[1].grad = flat[:3], flat[2:]
    assert gather(tie(buckets, None, together=True)[0], given) == ([[1.0] * 3] * 2, [1, 0])


def test_a_gradient_of_another_shape_is_named() -> None:
    """The module was changed after it was wrapped."""
    given, buckets = made(torch.float32, torch.float32)
    given[0].grad = torch.ones(3)
    given[1].data = torch.zeros(4)
    given[1].grad = torch.ones(4)
    with pytest.raises(AllhandsError, match="p1") as caught:
        gather(tie(buckets, None, together=True)[0], given)
    assert caught.value.slug == "module-changed"
