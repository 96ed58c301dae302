"""The job's key-value store as a torch store: every operation uses the member's one connection."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .._torch import FileStore, HashStore, TCPStore
from ..control.member import Member
from ..control.messages import StoreReply
from ..control.rendezvous import Announcement, FileRendezvous
from ..diagnosis import duration, join
from ..engines.gloo.connections import Connections
from ..errors import fail

__all__ = ["MemberStore", "StoreRendezvous"]

# torch's own default for a store.
_DEFAULT_TIMEOUT = timedelta(seconds=300)

# How much of a list of keys a message shows.
_MOST_KEYS = 4


class MemberStore(Store):
    """A `torch.distributed.Store` on the coordinator. Any rank, any thread; waits end with the group.

    torch's C++ code keeps no reference to the Python part of a store, so its maker must keep it.
    """

    def __init__(self, member: Member, connections: Connections) -> None:
        super().__init__()
        self._member = member
        self._connections = connections
        self._timeout = _DEFAULT_TIMEOUT
        self._clones: list[MemberStore] = []

    # Reading and writing -----------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it at most the store's timeout."""
        return self._ask("get", [key], wait_s=self._timeout.total_seconds()).values[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number at ``key`` (0 where there is none) and return the sum."""
        return self._ask("add", [key], number=amount).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected`` (or missing and "" is expected); return what is there."""
        return self._ask("compare_set", [key], expected, desired).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._ask("append", [key], value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of all ``keys``, waiting for them at most the store's timeout."""
        return self._ask("multi_get", keys, wait_s=self._timeout.total_seconds()).values

    def multi_set(self, keys: list[str], values: list[str] | list[bytes]) -> None:
        """Set all ``keys`` in one step."""
        if len(keys) != len(values):
            raise fail(
                "invalid-argument",
                f"multi_set got {len(keys)} keys and {len(values)} values",
                who=f"rank {self._member.rank}",
                fix="give one value for each key",
            )
        self._ask("multi_set", keys, *values)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        return bool(self._ask("delete", [key]).number)

    def check(self, keys: list[str]) -> bool:
        """Return, without waiting, whether all ``keys`` are there."""
        return bool(self._ask("check", keys).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there, at most ``timeout`` (by default the store's)."""
        self._ask("wait", keys, wait_s=(timeout or self._timeout).total_seconds())

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._ask("num_keys", []).number

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [name.decode() for name in self._ask("list_keys", []).values]

    # Queues ------------------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._ask("push", [key], value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # torch's signature
        """Take the first value of the queue ``key``; with ``block``, wait for one at most the store's timeout."""
        return self._ask("pop", [key], wait_s=self._timeout.total_seconds() if block else 0.0).values[0]

    def queue_len(self, key: str) -> int:
        """Return how many values are in the queue ``key``."""
        return self._ask("length", [key]).number

    # About the store ---------------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """How long an operation waits for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits for a key."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are there."""
        return True

    def clone(self) -> MemberStore:
        """Return another store on the same connection, with a timeout of its own."""
        made = MemberStore(self._member, self._connections)
        made.set_timeout(self._timeout)
        # torch's C++ code takes the clone without its Python part.
        self._clones.append(made)
        return made

    # The names under which torch's C++ code looks for these two.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, op: Any, keys: list[str], *values: str | bytes, number: int = 0, wait_s: float = 0.0) -> StoreReply:
        data = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        if op in {"set", "multi_set"}:
            for value in data:
                self._connections.published(value)
        reply = self._member.store_request(op, list(keys), data, number=number, wait_s=wait_s)
        if reply.problem:
            self._raise(reply.problem, op, keys, wait_s)
        if op in {"get", "multi_get"}:
            for value in reply.values:
                self._connections.learned(value)
        return reply

    def _raise(self, problem: str, op: str, keys: list[str], wait_s: float) -> None:
        shown = join([repr(key) for key in keys[:_MOST_KEYS]] + (["more"] if len(keys) > _MOST_KEYS else []))
        slug, why = "invalid-argument", ""
        match problem:
            case "empty":
                raise dist.QueueEmptyError(f"the queue {shown} is empty")
            case "full":
                slug, what = "store-full", f"the job's store has no room for {shown}"
                why = "all values together reached the store's limit of 1 GiB"
                fix = "pass large data as tensors or files, and delete keys that are no longer needed"
            case "too-large":
                what = f"the value of {shown} is too large for one answer"
                why = "an operation and its answer travel in one message of at most 64 MiB each"
                fix = "pass large data as tensors or files, or cut it into several keys"
            case "not-a-number":
                what = f"add() on {shown}, which does not hold a number"
                fix = "use a key that only add() writes to"
            case _:
                slug, what = "store-timeout", f"{shown} did not appear in the store within {duration(wait_s)} ({op})"
                why = "no rank set it in that time (observed by the coordinator)"
                fix = f"see that a rank sets {shown} before, or raise the timeout (store.set_timeout, or that of {op})"
        raise fail(slug, what, who=f"rank {self._member.rank}", why=why, fix=fix)


class StoreRendezvous:
    """Any torch store as the place where ranks find the coordinator."""

    private = False

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self.wide = _wide(store)

    def describe(self) -> str:
        """Name the store."""
        return f"the {type(self._store).__name__} that was given"

    def read(self) -> Announcement | None:
        """Return the published announcement, None if there is none."""
        if not self._store.check([self._key]):
            return None
        return msgspec.json.decode(self._store.get(self._key), type=Announcement)

    def prepare(self) -> None:
        """Nothing of an earlier run is in the way: the key counts the groups of this process."""

    def publish(self, announcement: Announcement) -> None:
        """Make the announcement visible to all ranks."""
        self._store.set(self._key, announcement.pack().decode())

    def clear(self) -> None:
        """Keep the announcement: a slower rank may not have read it yet, and the store ends with the job."""


def _wide(store: Store) -> bool:
    """Return whether ranks on other hosts may share ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return False
    if isinstance(store, TCPStore):
        host = str(store.host)
        return not (host in {"localhost", "::1"} or host.startswith("127."))
    if isinstance(store, FileStore):
        return FileRendezvous(str(store.path)).wide
    return True
