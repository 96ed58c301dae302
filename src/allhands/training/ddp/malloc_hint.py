"""What the C library does with the memory of tensors that come and go in every step: it is to keep it."""

from __future__ import annotations

import torch

__all__ = ["keep"]

# The largest block from whose end glibc learns, less what it and torch add to it.
_MOST_BYTES = (32 << 20) - (8 << 10)


def keep(size: int) -> None:
    """Let the C library keep memory that was freed, where about ``size`` bytes come and go in every step.

    By default glibc gives back to the kernel what is free at the end of the heap beyond 128 KiB, and larger blocks at
    once. Each page that it then gets anew costs 1 to 2 us: a step of a small transformer took 1,348, which is 3 of its
    145 ms. From a block that was freed it learns that such blocks come and go: blocks up to that size come from
    the heap then, and twice as much may be free there. So one is made and freed, which takes no memory, as nothing is
    written to it. torch's own class teaches it the same with its buckets. Other allocators learn nothing from it.
    """
    torch.empty(min(size, _MOST_BYTES), dtype=torch.uint8)
