from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from allhands.training.ddp.ddp import find_tensors, to_device

Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # as models return it


@dataclass
class Found:
    """A dataclass, as some models return."""

    value: torch.Tensor
    number: int = 0


def test_find_tensors_in_containers() -> None:
    """In lists, tuples, mappings and dataclasses, in order; other values are skipped."""
    a, b, c, d = torch.ones(4).unbind()
    assert list(find_tensors({"x": [a, None], "y": Pair(b, "text"), "z": OrderedDict(q=Found(c)), "w": (d,)})) == [
        a,
        b,
        c,
        d,
    ]
    assert list(find_tensors(Found)) == []


def test_to_device_keeps_containers() -> None:
    """Tensors are moved to the device; container types and other values stay the same."""
    value = {"x": [torch.ones(1)], "y": Pair(torch.ones(1), "text")}
    found = to_device(value, torch.device("meta"))
    assert found["x"][0].is_meta
    assert isinstance(found["y"], Pair)
    assert found["y"].b == "text"
