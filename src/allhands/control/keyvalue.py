"""The job's key-value store with the operations of torch's stores, as a table without I/O.

No operation blocks. One that must wait for a key is parked; the operation that sets the key returns the parked
operations that can be answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from .messages import MOST_BYTES, StoreReply, StoreRequest

__all__ = ["MOST_HELD", "KeyValue", "Parked"]

# The limit for all values together. Addresses and plans need megabytes; a gigabyte means that tensors pass through the
# store, which must not exhaust the memory of rank 0's host.
MOST_HELD = 1024 * 1024 * 1024

# Counters are signed 64-bit integers, as in torch's stores.
_LEAST, _MOST = -(2**63), 2**63 - 1

# Upper bound of msgpack's overhead per value and per reply.
_REPLY_OVERHEAD = 64

_WAITING = frozenset({"get", "wait", "multi_get", "pop"})


class Parked(msgspec.Struct, eq=False):
    """An operation of ``owner`` that waits for its keys until ``deadline``."""

    owner: object
    ask: StoreRequest
    deadline: float


def _limit_size(reply: StoreReply) -> StoreReply:
    """Return ``reply``, or the problem "too-large" if it exceeds one message."""
    if sum(map(len, reply.values)) + _REPLY_OVERHEAD * (len(reply.values) + 1) <= MOST_BYTES:
        return reply
    return StoreReply(reply.id, problem="too-large")


class KeyValue:
    """Keys, queues and the operations that wait for them."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._parked: dict[str, list[Parked]] = {}
        self._held = 0
        self._most = most

    def handle(
        self, owner: object, ask: StoreRequest, now: float
    ) -> tuple[StoreReply | None, list[tuple[Parked, StoreReply]]]:
        """Execute ``ask``; return its reply (None if parked) and the parked operations that it released."""
        if self._missing(ask):
            if ask.op == "pop" and ask.wait_s <= 0:
                return StoreReply(ask.id, problem="empty"), []
            if ask.wait_s <= 0:
                return StoreReply(ask.id, problem="timeout"), []
            # Under all its keys, not only the missing ones: a present key may be deleted while it waits.
            parked = Parked(owner, ask, now + ask.wait_s)
            for key in set(ask.keys):
                self._parked.setdefault(key, []).append(parked)
            return None, []
        reply = self._apply(ask)
        return _limit_size(reply), self._release(ask.keys)

    def expire(self, now: float) -> list[tuple[Parked, StoreReply]]:
        """Return the parked operations whose deadline has passed, each with its reply."""
        late = {id(parked): parked for queue in self._parked.values() for parked in queue if parked.deadline <= now}
        for parked in late.values():
            self._unpark(parked)
        return [(parked, StoreReply(parked.ask.id, problem="timeout")) for parked in late.values()]

    def forget(self, owner: object) -> None:
        """Drop the parked operations of ``owner``."""
        mine = {id(parked): parked for queue in self._parked.values() for parked in queue if parked.owner is owner}
        for parked in mine.values():
            self._unpark(parked)

    def _missing(self, ask: StoreRequest) -> set[str]:
        if ask.op not in _WAITING:
            return set()
        if ask.op == "pop":
            return {key for key in ask.keys[:1] if not self._queues.get(key)}
        return {key for key in ask.keys if key not in self._values and not (ask.op == "wait" and key in self._queues)}

    def _unpark(self, parked: Parked) -> None:
        for key in set(parked.ask.keys):
            queue = self._parked.get(key)
            if queue is not None and parked in queue:
                queue.remove(parked)
                if not queue:
                    del self._parked[key]

    def _release(self, keys: Iterable[str]) -> list[tuple[Parked, StoreReply]]:
        released: list[tuple[Parked, StoreReply]] = []
        for key in keys:
            for parked in self._parked.get(key, [])[:]:
                if not self._missing(parked.ask):
                    self._unpark(parked)
                    released.append((parked, _limit_size(self._apply(parked.ask))))
        return released

    def _apply(self, ask: StoreRequest) -> StoreReply:
        """Execute an operation whose keys are present."""
        try:
            key = ask.keys[0] if ask.keys else ""
            value = ask.values[0] if ask.values else b""
            match ask.op:
                case "set":
                    return self._write(ask, {key: value})
                case "multi_set":
                    return self._write(ask, dict(zip(ask.keys, ask.values, strict=False)))
                case "append":
                    return self._write(ask, {key: self._values.get(key, b"") + value})
                case "get":
                    return StoreReply(ask.id, [self._values[key]])
                case "multi_get":
                    return StoreReply(ask.id, [self._values[name] for name in ask.keys])
                case "wait":
                    return StoreReply(ask.id)
                case "check":
                    there = all(name in self._values or name in self._queues for name in ask.keys)
                    return StoreReply(ask.id, number=int(there))
                case "add":
                    total = int(self._values.get(key, b"0")) + ask.number
                    if not _LEAST <= total <= _MOST:
                        return StoreReply(ask.id, problem="not-a-number")
                    return self._write(ask, {key: str(total).encode()}, number=total)
                case "compare_set":
                    # As in torch: a missing key equals an empty expectation; otherwise the expectation is returned.
                    expected, desired = (*ask.values, b"", b"")[:2]
                    current = self._values.get(key)
                    if current == expected or (current is None and not expected):
                        return self._write(ask, {key: desired}, [desired])
                    return StoreReply(ask.id, [expected if current is None else current])
                case "delete":
                    removed = self._values.pop(key, None)
                    if removed is not None:
                        self._held -= len(key) + len(removed)
                    return StoreReply(ask.id, number=int(removed is not None))
                case "num_keys":
                    return StoreReply(ask.id, number=len(self._values))
                case "list_keys":
                    return StoreReply(ask.id, [name.encode() for name in self._values])
                case "push":
                    if self._held + len(value) > self._most:
                        return StoreReply(ask.id, problem="full")
                    self._queues.setdefault(key, deque()).append(value)
                    self._held += len(value)
                    return StoreReply(ask.id)
                case "pop":
                    first = self._queues[key].popleft()
                    self._held -= len(first)
                    if not self._queues[key]:
                        del self._queues[key]
                    return StoreReply(ask.id, [first])
                case "length":
                    return StoreReply(ask.id, number=len(self._queues.get(key, ())))
        except ValueError:
            # add() on a value that is not a number.
            return StoreReply(ask.id, problem="not-a-number")
        except KeyError:
            # The request named no key.
            return StoreReply(ask.id, problem="no-such-key")

    def _write(
        self, ask: StoreRequest, fresh: dict[str, bytes], values: list[bytes] | None = None, number: int = 0
    ) -> StoreReply:
        """Set keys; reply with ``values`` and ``number``."""
        growth = sum(
            len(value) - len(self._values[key]) if key in self._values else len(key) + len(value)
            for key, value in fresh.items()
        )
        if self._held + growth > self._most:
            return StoreReply(ask.id, values or [], number, problem="full")
        self._values.update(fresh)
        self._held += growth
        return StoreReply(ask.id, values or [], number)
