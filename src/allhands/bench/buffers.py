"""The tensors that a rank moves for one size, and whether an operation did to them what it should."""

from __future__ import annotations

from typing import Any

import torch

from .operations import OPERATIONS

__all__ = ["Buffers"]


class Buffers:
    """One rank's tensors for one operation and size: float32, zero, so that summing them again changes nothing."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int, device: str = "cpu") -> None:
        self._operation = operation
        self._rank = rank
        self._ranks = ranks
        what = OPERATIONS[operation]
        self.tensors: dict[str, Any] = {"whole": None, "other": None, "part": None}
        for name in what.buffers:
            if name == "part":
                self.tensors[name] = torch.zeros(size // 4 // ranks, device=device)
            elif rank == 0 or not what.rooted:
                self.tensors[name] = torch.zeros(size // 4, device=device)
        self._parts = self._cut("whole")
        self._others = self._cut("other")

    def _cut(self, name: str) -> list[torch.Tensor] | None:
        whole = self.tensors[name]
        if whole is None or not OPERATIONS[self._operation].divided:
            return None
        return list(whole.chunk(self._ranks))

    def names(self) -> dict[str, Any]:
        """Return what the text of a call may name."""
        return {**self.tensors, "parts": self._parts, "others": self._others}

    def fill(self) -> None:
        """Write what each rank gives, so that `right` can tell whether the others got it."""
        whole, part, parts = self.tensors["whole"], self.tensors["part"], self._parts or []
        match self._operation:
            case "all_reduce" | "reduce":
                whole.fill_(self._rank + 1)
            case "broadcast" | "send_recv":
                whole.fill_(7 if self._rank == 0 else 0)
            case "all_gather" | "all_gather_into_tensor" | "gather":
                part.fill_(self._rank + 1)
            case "scatter":
                for number, each in enumerate(parts):
                    each.fill_(number + 1)
            case "reduce_scatter" | "reduce_scatter_tensor":
                for number, each in enumerate(parts):
                    each.fill_((self._rank + 1) * (number + 1))
            case "all_to_all" | "all_to_all_single":
                for number, each in enumerate(parts):
                    each.fill_(self._rank * self._ranks + number + 1)

    def right(self) -> bool:
        """Tell whether this rank got what the others gave."""
        whole, part, rank, ranks = self.tensors["whole"], self.tensors["part"], self._rank, self._ranks
        total = ranks * (ranks + 1) // 2
        match self._operation:
            case "all_reduce":
                return _is(whole, total)
            case "reduce":
                return rank != 0 or _is(whole, total)
            case "broadcast":
                return _is(whole, 7)
            case "send_recv":
                return rank > 1 or _is(whole, 7)
            case "all_gather" | "all_gather_into_tensor" | "gather":
                return all(_is(each, number + 1) for number, each in enumerate(self._parts or []))
            case "scatter":
                return _is(part, rank + 1)
            case "reduce_scatter" | "reduce_scatter_tensor":
                return _is(part, (rank + 1) * total)
            case "all_to_all" | "all_to_all_single":
                return all(_is(each, number * ranks + rank + 1) for number, each in enumerate(self._others or []))
        return True

    def clear(self) -> None:
        """Write zeros everywhere."""
        for tensor in self.tensors.values():
            if tensor is not None:
                tensor.zero_()


def _is(tensor: torch.Tensor, value: float) -> bool:
    least, greatest = torch.aminmax(tensor)
    return bool(least == value and greatest == value)
