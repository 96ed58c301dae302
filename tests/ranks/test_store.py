"""The assertions of torch's own store tests, with our store on a real coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _test_python_store
from torch.distributed import QueueEmptyError
from torch.distributed.distributed_c10d import PrefixStore

import allhands
from allhands.control.messages import MOST_BYTES
from allhands.groups import session
from ranks.harness import free_port

# Long enough for a reply on a loaded machine, short enough to be waited out.
SHORT = timedelta(milliseconds=150)


@pytest.fixture(scope="module")
def member_store() -> Iterator[Any]:
    """Form a group of one, whose coordinator is a real process, and take its store."""
    # At an address of its own: processes with one parent, as those of pytest are, meet where none is given.
    where = f"tcp://127.0.0.1:{free_port()}"
    allhands.init_process_group("gloo", where, rank=0, world_size=1, timeout=timedelta(seconds=20))
    found = session.current()
    assert found is not None
    yield found.store
    allhands.destroy_process_group()


@pytest.fixture(params=["plain", "prefixed"])
def store(request: pytest.FixtureRequest, member_store: Any) -> Iterator[Any]:
    """Return the store as it is, and as torch sees it: through its C++ prefix; each with keys of its own."""
    member_store.set_timeout(SHORT)
    if request.param == "prefixed":
        yield PrefixStore(request.node.name, member_store)
    else:
        yield member_store
        for key in member_store.list_keys():
            member_store.delete_key(key)
    member_store.set_timeout(timedelta(seconds=300))


plain_only = pytest.mark.parametrize("store", ["plain"], indirect=True)


@pytest.mark.parametrize("value", ["text", b"bytes", "", b"", "größe", bytes(range(256)), b"\0" * 5], ids=repr)
def test_a_value_is_returned_as_bytes(store: Any, value: str | bytes) -> None:
    """Text and bytes, empty ones and every byte there is, come back as the bytes they are."""
    store.set("key", value)
    assert store.get("key") == (value.encode() if isinstance(value, str) else value)


def test_set_overwrites(store: Any) -> None:
    """A key holds what was set last."""
    for value in ("one", "two", ""):
        store.set("key", value)
        assert store.get("key") == value.encode()


def test_keys_may_be_called_anything(store: Any) -> None:
    """Slashes, blanks, long names and names that are no ASCII are different keys."""
    names = ["a", "a/b", "a//b", " a", "ä", "k" * 1000]
    for number, name in enumerate(names):
        store.set(name, str(number))
    assert [store.get(name) for name in names] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_add_counts(store: Any) -> None:
    """add() begins at 0, returns the sum, and the key reads as decimal text."""
    assert [store.add("n", number) for number in (1, 2, -10, 0)] == [1, 3, -7, -7]
    assert store.get("n") == b"-7"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_add_to_text_is_an_error_of_the_caller(store: Any) -> None:
    """Adding to what is no number raises, names the key, and harms neither the key nor the group."""
    store.set("text", "abc")
    with pytest.raises(ValueError, match="text") as caught:
        store.add("text", 1)
    assert isinstance(caught.value, allhands.ArgumentError)
    assert store.get("text") == b"abc"


def test_compare_set_as_torchs_tests_have_it(store: Any) -> None:
    """The sequence of torch's own test: a key that is missing, expected wrongly, and expected rightly."""
    assert store.compare_set("key", "expected", "desired") == b"expected"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.get("key") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


@plain_only
def test_delete_key(store: Any) -> None:
    """A key can be deleted once; then it is not there."""
    store.set("key", "value")
    before = store.num_keys()
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert store.num_keys() == before - 1
    with pytest.raises(dist.DistStoreError):
        store.get("key")


def test_delete_and_count_through_a_prefix(member_store: Any) -> None:
    """The C++ code of torch, NCCL's point-to-point set-up included, deletes and counts keys through a prefix."""
    prefixed: Any = PrefixStore("through", member_store)
    prefixed.set("key", "value")
    assert prefixed.num_keys() == member_store.num_keys()
    assert prefixed.delete_key("key")
    assert not prefixed.delete_key("key")


def test_check_does_not_wait(store: Any) -> None:
    """check() returns at once whether all keys exist."""
    store.set_timeout(timedelta(seconds=300))
    store.set("a", "")
    assert store.check([])
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    store.set("b", "")
    assert store.check(["b", "a"])


def test_append(store: Any) -> None:
    """append() makes a key and adds to it, text or bytes."""
    store.append("key", "po")
    store.append("key", b"ta")
    store.append("key", "")
    store.append("key", "to")
    assert store.get("key") == b"potato"


def test_multi_set_and_multi_get(store: Any) -> None:
    """Several keys are set and read in one step, in the order given."""
    store.multi_set(["foo", "bar"], ["po", b"tato\xff"])
    assert store.multi_get(["bar", "foo", "bar"]) == [b"tato\xff", b"po", b"tato\xff"]
    assert store.multi_get([]) == []


def test_multi_set_needs_a_value_for_each_key(store: Any) -> None:
    """Lists of different length are an error of the caller, and nothing is set."""
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["foo", "bar"], ["po"])
    assert not store.check(["foo"])


@plain_only
def test_num_keys_and_list_keys(store: Any) -> None:
    """Keys are counted and listed; changing one makes no new one."""
    before = set(store.list_keys())
    store.multi_set(["a", "b"], ["1", "2"])
    store.add("n", 1)
    store.set("a", "3")
    assert set(store.list_keys()) == before | {"a", "b", "n"}
    assert store.num_keys() == len(before) + 3


def test_large_values(store: Any) -> None:
    """A value of a mebibyte is stored and returned unchanged, quickly enough for a checkpoint plan."""
    value = bytes(range(256)) * 4096
    store.set("large", value)
    assert store.get("large") == value
    store.append("large", value)
    assert store.multi_get(["large", "large"]) == [value * 2] * 2


# Time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "args"), [("get", "key"), ("wait", ["key"]), ("wait", ["there", "key"]), ("multi_get", ["there", "key"])]
)
def test_a_key_that_does_not_come_is_a_store_error(store: Any, call: str, args: Any) -> None:
    """Waiting ends at the store's timeout with torch's DistStoreError, with the key and a slug."""
    store.set("there", "")
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="key") as caught:
        getattr(store, call)(args)
    assert SHORT.total_seconds() <= time.monotonic() - started < 10
    assert isinstance(caught.value, allhands.StoreTimeout)
    assert caught.value.slug == "store-timeout"


def test_wait_takes_a_timeout_of_its_own(store: Any) -> None:
    """The timeout given to wait() counts, not the store's."""
    store.set_timeout(timedelta(seconds=300))
    with pytest.raises(dist.DistStoreError):
        store.wait(["key"], SHORT)


def test_the_timeout_can_be_read(store: Any) -> None:
    """What was set is what is read, through a prefix too."""
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)


def test_waiting_ends_when_the_key_is_set(store: Any) -> None:
    """One thread waits, another sets; the connection serves both."""
    store.set_timeout(timedelta(seconds=20))
    timer = threading.Timer(0.05, lambda: store.set("late", "here"))
    timer.start()
    assert store.get("late") == b"here"
    timer.join()


def test_many_threads_share_one_store(store: Any) -> None:
    """Each of many threads gets its own replies: no count is lost and no value is returned to another thread."""
    store.set_timeout(timedelta(seconds=20))
    wrong = []

    def work(number: int) -> None:
        for step in range(40):
            store.set(f"{number}", f"{number}/{step}")
            store.add("total", 1)
            if store.get(f"{number}") != f"{number}/{step}".encode():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert store.get("total") == b"320"


# Queues ----------------------------------------------------------------------------------------------------------


@plain_only
def test_queues_keep_their_order(store: Any) -> None:
    """A queue returns values in order of arrival; an empty queue does not exist."""
    assert store.queue_len("q") == 0
    for value in ("one", b"\xff", ""):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert store.check(["q"])
    store.wait(["q"])
    assert [store.queue_pop("q"), store.queue_pop("q", block=False), store.queue_pop("q")] == [b"one", b"\xff", b""]
    assert store.queue_len("q") == 0
    assert not store.check(["q"])


@plain_only
def test_an_empty_queue_is_reported_as_empty(store: Any) -> None:
    """Without block, an empty queue raises torch's QueueEmptyError at once; with it, a DistStoreError in time."""
    store.set_timeout(timedelta(seconds=300))
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError) as caught:
        store.queue_pop("q")
    assert not isinstance(caught.value, QueueEmptyError)


@plain_only
def test_a_blocked_pop_ends_with_the_push(store: Any) -> None:
    """Who waits for a queue gets what is pushed."""
    store.set_timeout(timedelta(seconds=20))
    timer = threading.Timer(0.05, lambda: store.queue_push("q", "pushed"))
    timer.start()
    assert store.queue_pop("q") == b"pushed"
    timer.join()


# What torch does with a store -------------------------------------------------------------------------------------


def test_prefixes_nest(member_store: Any) -> None:
    """Prefixes of prefixes are different rooms in one store, seen from outside under their full name."""
    outer: Any = PrefixStore("outer", member_store)
    inner: Any = PrefixStore("inner", outer)
    outer.set("key", "o")
    inner.set("key", "i")
    assert (outer.get("key"), inner.get("key")) == (b"o", b"i")
    assert member_store.get("outer/inner/key") == b"i"
    assert inner.add("n", 5) == 5
    assert member_store.get("outer/inner/n") == b"5"


def test_a_clone_is_another_store_on_the_same_keys(member_store: Any) -> None:
    """A clone sees the same keys, and has a timeout of its own."""
    twin = member_store.clone()
    twin.set("twin", "1")
    assert member_store.get("twin") == b"1"
    twin.set_timeout(timedelta(seconds=3))
    assert member_store.timeout != timedelta(seconds=3)


def test_a_clone_made_by_torch_lives(member_store: Any) -> None:
    """The C++ code of torch clones stores and keeps only the C++ part; the clone must work all the same."""
    prefixed: Any = PrefixStore("twin", member_store)
    twin = prefixed.clone()
    twin.set("key", "1")
    assert member_store.get("twin/key") == b"1"


def test_torchs_own_test_of_python_stores(member_store: Any) -> None:
    """Ours passes torch's C++ test for stores written in Python."""
    _test_python_store(PrefixStore("python-store", member_store))


def test_a_store_barrier(store: Any) -> None:
    """A barrier on the store works, and ends in time if a rank is missing."""
    store.barrier("all", 1, timedelta(seconds=5))
    with pytest.raises(dist.DistStoreError):
        store.barrier("missing", 2, SHORT)


# More than fits --------------------------------------------------------------------------------------------------


def test_a_value_that_is_too_large_to_send(member_store: Any) -> None:
    """A value larger than a message is an error of ours that states it, and the group still works."""
    with pytest.raises(allhands.ArgumentError, match="over the limit"):
        member_store.set("huge", bytes(MOST_BYTES + 1))
    assert not member_store.check(["huge"])
