"""Memory of one GPU that several processes have mapped: a row for each rank, and one for what they make together."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from . import driver
from .lane import agree, at

__all__ = ["Arena"]

# A row at first: enough for what most models send at a time, and 72 MiB in all for eight ranks.
_FIRST_BYTES = 4 << 20

# Rows of more than this make nothing faster: switching between processes costs the GPU some 0.1 ms, moving this much
# 0.1 ms too.
_MOST_BYTES = 256 << 20

# The share of the GPU's memory that all rows of a group may take: it is the model's.
_SHARE = 32

# Rows are used in turn, so that data of the next call can be brought while others still read that of the last.
_TURNS = 2


class Arena:
    """The memory as one rank sees it. Rank 0 of the group has it, the others map it; all of them form and grow it."""

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._number = 0
        self._address = 0
        # Of rank 0: what was outgrown, which others may have mapped still.
        self._outgrown: list[int] = []
        self.row_bytes = 0
        self.rows: list[torch.Tensor] = []
        self._most = min(_MOST_BYTES, torch.cuda.get_device_properties(device).total_memory // _SHARE // ranks)

    def fits(self, size: int) -> bool:
        """Tell whether a row holds ``size`` bytes, or cannot be made larger anyway."""
        return size <= self.row_bytes or self.row_bytes >= self._most

    def grow(self, size: int) -> str:
        """Make rows that hold ``size`` bytes, or as many as they may have. Every rank calls this, with the same size.

        Returns why it could not be done on some rank, the same on all of them; the rows are then as they were.
        """
        wanted = max(_FIRST_BYTES, 1 << max(0, size - 1).bit_length())
        row_bytes = min(wanted, self._most) // 256 * 256
        total = row_bytes * (self._ranks + 1) * _TURNS
        self._number += 1
        address, trouble = 0, ""
        try:
            address = self._hold(total)
        except (driver.DriverError, RuntimeError) as problem:
            trouble = str(problem) or type(problem).__name__
        trouble = agree(self._store, f"arena/{self._number}/rank", self._rank, self._ranks, trouble)
        if trouble:
            # Nobody asks again for more than there is.
            self._most = self.row_bytes
            if address:
                self._let_go(address)
            return trouble
        if self._address:
            self._let_go(self._address)
        self._address, self.row_bytes = address, row_bytes
        whole = at(address, total, self._device).view(_TURNS, self._ranks + 1, row_bytes)
        self.rows = list(whole.unbind())
        return ""

    def _hold(self, total: int) -> int:
        key = f"arena/{self._number}"
        if self._rank:
            words: dict[str, Any] = json.loads(self._store.get(key))
            if words["why"]:
                raise driver.DriverError(words["why"])
            return driver.take(bytes.fromhex(words["handle"]))
        address = 0
        try:
            address = driver.allocate(total)
            self._store.set(key, json.dumps({"why": "", "handle": driver.handle(address).hex()}))
        except driver.DriverError as problem:
            self._store.set(key, json.dumps({"why": str(problem), "handle": ""}))
            if address:
                driver.free(address)
            raise
        return address

    def _let_go(self, address: int) -> None:
        if self._rank:
            driver.shut(address)
        else:
            self._outgrown.append(address)

    def close(self) -> None:
        """Let go of the memory, once nothing on this rank's stream uses it. Rank 0 still has it (`free`)."""
        self.rows = []
        if self._address:
            self._let_go(self._address)
        self._address = 0

    def free(self) -> None:
        """Give the memory back, on rank 0, once everyone has let go of it."""
        while self._outgrown:
            driver.free(self._outgrown.pop())
