"""The job's key-value store: what torch's stores can do, as a pure table with waiters.

The table never blocks: an operation that must wait for a key is parked, and whoever sets the key gets the
list of parked operations that can now be answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from .frames import MOST_BYTES
from .messages import Ask, Reply

__all__ = ["MOST_HELD", "KeyValue", "Parked"]

# All values together. Addresses and plans need megabytes; a gigabyte means that tensors are being passed
# through the control plane, and the host of rank 0 should not run out of memory for it.
MOST_HELD = 1024 * 1024 * 1024

# What torch's own stores count in: 64 bits with a sign.
_LEAST, _MOST = -(2**63), 2**63 - 1

# What msgpack adds to a value, and to the reply as a whole, at most.
_REPLY_OVERHEAD = 64

_WAITING = frozenset({"get", "wait", "multi_get", "pop"})


class Parked(msgspec.Struct, eq=False):
    """An operation of ``owner`` that waits for keys until ``deadline``."""

    owner: object
    ask: Ask
    deadline: float
    keys: set[str] = msgspec.field(default_factory=set)


def _fitting(reply: Reply) -> Reply:
    """Return ``reply``, or where it would not go into one message, the word that it does not."""
    if sum(map(len, reply.values)) + _REPLY_OVERHEAD * (len(reply.values) + 1) <= MOST_BYTES:
        return reply
    return Reply(reply.id, problem="too-large")


class KeyValue:
    """Keys and queues, and who waits for them."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._parked: dict[str, list[Parked]] = {}
        self._held = 0
        self._most = most

    def handle(self, owner: object, ask: Ask, now: float) -> tuple[Reply | None, list[tuple[Parked, Reply]]]:
        """Carry out ``ask``; return its reply (None if it is parked) and the parked operations it released."""
        if self._missing(ask):
            if ask.op == "pop" and ask.wait_s <= 0:
                return Reply(ask.id, problem="empty"), []
            if ask.wait_s <= 0:
                return Reply(ask.id, problem="timeout"), []
            # Under all its keys, not only the missing: one that is there may be deleted while it waits.
            self._park(Parked(owner, ask, now + ask.wait_s, set(ask.keys)))
            return None, []
        reply, touched = self._apply(ask)
        return _fitting(reply), self._release(touched)

    def expire(self, now: float) -> list[tuple[Parked, Reply]]:
        """Return the parked operations whose time is up, each with its reply."""
        late = {id(parked): parked for queue in self._parked.values() for parked in queue if parked.deadline <= now}
        for parked in late.values():
            self._unpark(parked)
        return [(parked, Reply(parked.ask.id, problem="timeout")) for parked in late.values()]

    def forget(self, owner: object) -> None:
        """Drop what ``owner`` was waiting for."""
        mine = {id(parked): parked for queue in self._parked.values() for parked in queue if parked.owner is owner}
        for parked in mine.values():
            self._unpark(parked)

    def _missing(self, ask: Ask) -> set[str]:
        if ask.op not in _WAITING:
            return set()
        if ask.op == "pop":
            return {key for key in ask.keys[:1] if not self._queues.get(key)}
        return {key for key in ask.keys if key not in self._values and not (ask.op == "wait" and key in self._queues)}

    def _park(self, parked: Parked) -> None:
        for key in parked.keys:
            self._parked.setdefault(key, []).append(parked)

    def _unpark(self, parked: Parked) -> None:
        for key in parked.keys:
            queue = self._parked.get(key)
            if queue is not None and parked in queue:
                queue.remove(parked)
                if not queue:
                    del self._parked[key]

    def _release(self, touched: Iterable[str]) -> list[tuple[Parked, Reply]]:
        released: list[tuple[Parked, Reply]] = []
        for key in touched:
            for parked in self._parked.get(key, [])[:]:
                if not self._missing(parked.ask):
                    self._unpark(parked)
                    released.append((parked, _fitting(self._apply(parked.ask)[0])))
        return released

    def _apply(self, ask: Ask) -> tuple[Reply, list[str]]:
        """Carry out an operation that need not wait; return its reply and the keys it brought into being."""
        try:
            key = ask.keys[0] if ask.keys else ""
            value = ask.values[0] if ask.values else b""
            match ask.op:
                case "set":
                    return self._write(ask, [key], [value])
                case "multi_set":
                    return self._write(ask, ask.keys, ask.values)
                case "append":
                    return self._write(ask, [key], [self._values.get(key, b"") + value])
                case "get":
                    return Reply(ask.id, [self._values[key]]), []
                case "multi_get":
                    return Reply(ask.id, [self._values[name] for name in ask.keys]), []
                case "wait":
                    return Reply(ask.id), []
                case "check":
                    there = all(name in self._values or name in self._queues for name in ask.keys)
                    return Reply(ask.id, number=int(there)), []
                case "add":
                    total = int(self._values.get(key, b"0")) + ask.number
                    if not _LEAST <= total <= _MOST:
                        return Reply(ask.id, problem="not-a-number"), []
                    reply, touched = self._write(ask, [key], [str(total).encode()])
                    return Reply(ask.id, number=total, problem=reply.problem), touched
                case "compare_set":
                    return self._compare_set(ask, key)
                case "delete":
                    return Reply(ask.id, number=int(self._delete(key))), []
                case "num_keys":
                    return Reply(ask.id, number=len(self._values)), []
                case "list_keys":
                    return Reply(ask.id, [name.encode() for name in self._values]), []
                case "push":
                    if self._held + len(value) > self._most:
                        return Reply(ask.id, problem="full"), []
                    self._queues.setdefault(key, deque()).append(value)
                    self._held += len(value)
                    return Reply(ask.id), [key]
                case "pop":
                    first = self._queues[key].popleft()
                    self._held -= len(first)
                    if not self._queues[key]:
                        del self._queues[key]
                    return Reply(ask.id, [first]), []
                case "length":
                    return Reply(ask.id, number=len(self._queues.get(key, ()))), []
        except ValueError:
            # add() on a key that holds text.
            return Reply(ask.id, problem="not-a-number"), []
        except KeyError:
            # An operation that named no key at all.
            return Reply(ask.id, problem="no-such-key"), []

    def _compare_set(self, ask: Ask, key: str) -> tuple[Reply, list[str]]:
        # torch's rule: a missing key counts as equal to an empty expectation, and otherwise the expectation
        # itself is returned.
        expected, desired = (*ask.values, b"", b"")[:2]
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            reply, touched = self._write(ask, [key], [desired])
            return Reply(ask.id, [desired], problem=reply.problem), touched
        return Reply(ask.id, [expected if current is None else current]), []

    def _write(self, ask: Ask, keys: list[str], values: list[bytes]) -> tuple[Reply, list[str]]:
        fresh = dict(zip(keys, values, strict=False))
        growth = sum(
            len(key) + len(value) - (len(self._values[key]) + len(key) if key in self._values else 0)
            for key, value in fresh.items()
        )
        if self._held + growth > self._most:
            return Reply(ask.id, problem="full"), []
        self._values.update(fresh)
        self._held += growth
        return Reply(ask.id), list(fresh)

    def _delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._held -= len(key) + len(value)
        return True
