from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch

from allhands.training.ddp.ddp import find_tensors, map_leaves

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


def test_map_leaves_keeps_containers() -> None:
    """Leaves are replaced; container types stay the same."""
    value = OrderedDict(x=[1], y=Pair(2, "text"), z=(), w=defaultdict(int, a=3))
    found = map_leaves(lambda leaf: leaf * 2, value)
    assert found == OrderedDict(x=[2], y=Pair(4, "texttext"), z=(), w={"a": 6})
    assert isinstance(found, OrderedDict)
    assert isinstance(found["w"], defaultdict)
    assert isinstance(found["y"], Pair)
