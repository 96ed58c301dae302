from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from allhands.training.ddp.ddp import find_tensors, to_device

Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # what models return


@dataclass
class Found:
    """What a model may return."""

    value: torch.Tensor
    number: int = 0


def test_tensors_are_found_wherever_they_are() -> None:
    """In lists, tuples, mappings and dataclasses, in order; other things are passed over."""
    a, b, c, d = torch.ones(4).unbind()
    assert list(find_tensors({"x": [a, None], "y": Pair(b, "text"), "z": OrderedDict(q=Found(c)), "w": (d,)})) == [
        a,
        b,
        c,
        d,
    ]
    assert list(find_tensors(Found)) == []


def test_what_is_moved_keeps_its_form() -> None:
    """Tensors go to the device; types of containers and all else stay."""
    value = {"x": [torch.ones(1)], "y": Pair(torch.ones(1), "text")}
    found = to_device(value, torch.device("meta"))
    assert found["x"][0].is_meta
    assert isinstance(found["y"], Pair)
    assert found["y"].b == "text"
