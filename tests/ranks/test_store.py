"""What torch's own tests ask of a store, asked of ours, on a real coordinator; and what torch builds on a store."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _test_python_store
from torch.distributed import QueueEmptyError
from torch.distributed.distributed_c10d import PrefixStore

import allhands
from allhands import session
from allhands.control.frames import MOST_BYTES
from ranks.harness import Result, free_port, launch, running

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


# One rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", b"bytes", "", b"", "größe", bytes(range(256)), b"\0" * 5], ids=repr)
def test_a_value_comes_back_as_bytes(store: Any, value: str | bytes) -> None:
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
    """check() tells at once whether all keys are there."""
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
    """Several keys are set and read in one step, in the order asked."""
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
    """A mebibyte goes in and comes out, whole, and quickly enough for a checkpoint plan."""
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
    """Waiting ends at the store's timeout with torch's DistStoreError, which says the key and its own slug."""
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


def test_waiting_ends_when_the_key_comes(store: Any) -> None:
    """One thread waits, another sets; the connection serves both."""
    store.set_timeout(timedelta(seconds=20))
    timer = threading.Timer(0.05, lambda: store.set("late", "here"))
    timer.start()
    assert store.get("late") == b"here"
    timer.join()


def test_many_threads_share_one_store(store: Any) -> None:
    """Each of many threads gets its own answers: no count is lost and no value goes to the wrong one."""
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
    """Values leave a queue in the order they came; an empty queue is not there."""
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
def test_an_empty_queue_is_said_to_be_empty(store: Any) -> None:
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
    """A test for stores written in Python comes with torch, in C++; ours passes it."""
    _test_python_store(PrefixStore("python-store", member_store))


def test_a_store_barrier(store: Any) -> None:
    """A barrier on the store works, and ends in time where someone is missing."""
    store.barrier("all", 1, timedelta(seconds=5))
    with pytest.raises(dist.DistStoreError):
        store.barrier("missing", 2, SHORT)


# More than fits --------------------------------------------------------------------------------------------------


def test_a_value_that_is_too_large_to_send(member_store: Any) -> None:
    """A value over the size of a message is an error of ours that says so, and the group goes on."""
    with pytest.raises(allhands.ArgumentError, match="over the limit"):
        member_store.set("huge", bytes(MOST_BYTES + 1))
    assert not member_store.check(["huge"])


# Two ranks -------------------------------------------------------------------------------------------------------

INIT = """
import time
from datetime import timedelta
import allhands as dist
import torch
from allhands import session
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
store = session.current().store
"""


def fine(results: list[Result]) -> list[Result]:
    """Return ``results`` where every rank ended well; fail with their words otherwise."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"
    return results


@pytest.mark.usefixtures("nursery")
def test_two_ranks_share_the_store() -> None:
    """One rank waits for the other's key, counts are common, and a queue hands each value to one rank."""
    results = fine(
        launch(
            INIT
            + """
if rank:
    gate("waiting")
    time.sleep(0.1)
    store.set("from 1", b"\\xff")
else:
    gate("waiting")
    say(value=store.get("from 1").hex())
total = [store.add("n", 1) for _ in range(100)]
store.barrier("counted", size)
say(total=store.add("n", 0), mine=total)
for number in range(5):
    store.queue_push("q", f"{rank}-{number}")
store.barrier("pushed", size)
say(popped=[store.queue_pop("q").decode() for _ in range(5)])
dist.destroy_process_group()
""",
            2,
        )
    )
    assert results[0]["value"] == "ff"
    assert [result["total"] for result in results] == [200, 200]
    assert sorted(results[0]["mine"] + results[1]["mine"]) == list(range(1, 201))
    popped = [result["popped"] for result in results]
    assert sorted(popped[0] + popped[1]) == [f"{rank}-{number}" for rank in range(2) for number in range(5)]
    for mine in popped:
        for rank in "01":
            ours = [value for value in mine if value.startswith(rank)]
            assert ours == sorted(ours)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(
    "call",
    [
        "store.get('never')",
        "store.wait(['never'], timedelta(seconds=60))",
        "store.queue_pop('never')",
        "dist.PrefixStore('x', store).multi_get(['never'])",
    ],
)
def test_waiting_for_a_key_ends_when_a_peer_is_killed(call: str) -> None:
    """Whoever waits for a key that a killed rank might have set raises PeerLost with its number, at once."""
    with running(
        INIT
        + f"""
say(ready=True)
if rank:
    time.sleep(60)
say(blocked=attempt(lambda: {call}))
""",
        2,
    ) as job:
        job.wait_for("ready")
        time.sleep(0.1)
        killed = job.signal(1, signal.SIGKILL)
        blocked = job.results()[0]["blocked"]
    assert (blocked["kind"], blocked["slug"], blocked["ranks"]) == ("PeerLost", "peer-lost", [1])
    # At once is a second, and more on a busy machine; this is a store's timeout of five minutes otherwise.
    assert blocked["over"] - killed < 1


@pytest.mark.usefixtures("nursery")
def test_values_that_together_are_too_large_to_send() -> None:
    """What grew too large for one message is an error on the rank that asks for it; the group goes on."""
    [result] = launch(
        INIT
        + """
for name in ("a", "b"):
    store.set(name, bytes(33 * 2**20))
say(asked=attempt(store.multi_get, ["a", "b"]), one=len(store.get("a")))
dist.destroy_process_group()
""",
        1,
    )
    assert result["one"] == 33 * 2**20
    assert "AllhandsError" in result["asked"]["bases"]


@pytest.mark.usefixtures("nursery")
def test_torch_builds_its_groups_on_it() -> None:
    """Gloo, object collectives and subgroups, made through our store, work as on torch's own."""
    results = fine(
        launch(
            INIT
            + """
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
everyone = [None] * size
dist.all_gather_object(everyone, {"rank": rank, "deep": [1, (2,)]})
shared = [rank, "words"]
dist.broadcast_object_list(shared, src=1)
groups = [dist.new_group([0, 1]), dist.new_group([rank]), dist.new_group([1])]
y = torch.full((1,), float(rank))
dist.all_reduce(y, group=groups[0])
dist.destroy_process_group(groups[0])
again = dist.new_group(backend="gloo")
z = torch.ones(1)
dist.all_reduce(z, group=again)
say(x=x.tolist(), everyone=everyone, shared=shared, y=y.item(), z=z.item(), backend=dist.get_backend(again))
dist.destroy_process_group()
""",
            2,
        )
    )
    for result in results:
        assert result["x"] == [3.0, 3.0, 3.0]
        assert result["everyone"] == [{"rank": 0, "deep": [1, [2]]}, {"rank": 1, "deep": [1, [2]]}]
        assert result["shared"] == [1, "words"]
        assert (result["y"], result["z"], result["backend"]) == (1.0, 2.0, "gloo")


@pytest.mark.usefixtures("nursery")
def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    """torch.distributed.checkpoint plans over object collectives on our group: what is saved is what is loaded."""
    results = fine(
        launch(
            INIT
            + """
import os
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(8.0)
saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.ones(3), "step": 7}
checkpoint.save(saved, checkpoint_id=os.environ["FOLDER"])
found = {"sharded": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "same": torch.zeros(3), "step": 0}
checkpoint.load(found, checkpoint_id=os.environ["FOLDER"])
say(local=found["sharded"].to_local().tolist(), same=found["same"].tolist(), step=found["step"])
dist.destroy_process_group()
""",
            2,
            {"FOLDER": str(tmp_path / "checkpoint")},
        )
    )
    assert [result["local"] for result in results] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert all((result["same"], result["step"]) == ([1.0, 1.0, 1.0], 7) for result in results)
    assert (tmp_path / "checkpoint" / ".metadata").exists()
