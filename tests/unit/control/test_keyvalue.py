from __future__ import annotations

from collections import deque
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.control.keyvalue import KeyValue, Parked
from allhands.control.messages import StoreOp, StoreReply, StoreRequest, decode_from_coordinator, encode

# The owner of what a test asks for; any object will do.
ME, YOU = "me", "you"


class Table:
    """A store whose operations are numbered automatically."""

    def __init__(self, **kw: Any) -> None:
        self.store = KeyValue(**kw)
        self.last = 0

    def ask(
        self,
        op: Any,
        *keys: str,
        values: tuple[bytes, ...] = (),
        number: int = 0,
        wait_s: float = 0.0,
        now: float = 0.0,
        owner: object = ME,
    ) -> tuple[StoreReply | None, list[tuple[Parked, StoreReply]]]:
        """Carry out one operation; the id of the n-th is n."""
        self.last += 1
        return self.store.handle(owner, StoreRequest(self.last, op, list(keys), list(values), number, wait_s), now)

    def do(self, op: Any, *keys: str, **kw: Any) -> StoreReply:
        """Carry out an operation that is answered at once and releases nobody."""
        reply, released = self.ask(op, *keys, **kw)
        assert reply is not None
        assert not released
        return reply

    def park(self, op: Any, *keys: str, **kw: Any) -> int:
        """Begin an operation that has to wait; return its id."""
        reply, released = self.ask(op, *keys, **({"wait_s": 10.0} | kw))
        assert reply is None
        assert not released
        return self.last

    def free(self, op: Any, *keys: str, **kw: Any) -> list[tuple[int, StoreReply]]:
        """Carry out an operation that goes well; return the ids and replies of those it released, in order."""
        reply, released = self.ask(op, *keys, **kw)
        assert reply is not None
        assert not reply.problem
        assert all(answer.id == parked.ask.id for parked, answer in released)
        return [(parked.ask.id, answer) for parked, answer in released]


# One operation at a time -----------------------------------------------------------------------------------------


def test_set_get_overwrite_delete() -> None:
    """A key has the value that was set last, any bytes, until it is deleted."""
    table = Table()
    for value in (b"", b"\x00\xff", b"text"):
        assert table.do("set", "k", values=(value,)) == StoreReply(table.last)
        assert table.do("get", "k").values == [value]
    assert table.do("num_keys").number == 1
    assert table.do("delete", "k").number == 1
    assert table.do("delete", "k").number == 0
    assert table.do("get", "k").problem == "timeout"


def test_add_counts_in_text() -> None:
    """A counter starts at 0, can be decreased, and is stored as decimal text, as in torch's stores."""
    table = Table()
    assert [table.do("add", "n", number=number).number for number in (1, 41, -50)] == [1, 42, -8]
    assert table.do("get", "n").values == [b"-8"]
    assert table.do("set", "n", values=(b"5",)).problem == ""
    assert table.do("add", "n", number=2).number == 7


def test_add_to_text_is_a_problem() -> None:
    """add() to a value that is not a number replies with a problem and changes nothing."""
    table = Table()
    table.do("set", "k", values=(b"text",))
    assert table.do("add", "k", number=1).problem == "not-a-number"
    assert table.do("get", "k").values == [b"text"]


@pytest.mark.parametrize("start", [b"9223372036854775807", b"-9223372036854775809", b"9" * 100])
def test_add_stays_within_what_can_be_sent(start: bytes) -> None:
    """A sum of more than 64 bits replies with a problem and is not stored."""
    table = Table()
    table.do("set", "n", values=(start,))
    reply = table.do("add", "n", number=1 if not start.startswith(b"-") else -1)
    assert reply.problem == "not-a-number"
    assert decode_from_coordinator(encode(reply)) == reply
    assert table.do("get", "n").values == [start]


@pytest.mark.parametrize(
    ("there", "expected", "desired", "returned", "after"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"old", b"new", b"old", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"old", b"other", b"new", b"old", b"old"),
        (b"old", b"", b"new", b"old", b"old"),
        (b"", b"", b"new", b"new", b"new"),
    ],
)
def test_compare_set(
    there: bytes | None, expected: bytes, desired: bytes, returned: bytes, after: bytes | None
) -> None:
    """compare_set follows torch's rule for every combination of current and expected value."""
    table = Table()
    if there is not None:
        table.do("set", "k", values=(there,))
    assert table.do("compare_set", "k", values=(expected, desired)).values == [returned]
    assert table.do("check", "k").number == int(after is not None)
    if after is not None:
        assert table.do("get", "k").values == [after]


def test_many_keys_at_once() -> None:
    """multi_set sets all keys; multi_get returns values in the order of the request, once all keys exist."""
    table = Table()
    table.do("multi_set", "a", "b", values=(b"1", b"2"))
    assert table.do("multi_get", "b", "a", "b").values == [b"2", b"1", b"2"]
    assert table.do("multi_get", "a", "c").problem == "timeout"
    assert table.do("multi_get").values == []


def test_append_makes_and_grows() -> None:
    """Append creates a missing key and extends a present one."""
    table = Table()
    table.do("append", "k", values=(b"ab",))
    table.do("append", "k", values=(b"c",))
    assert table.do("get", "k").values == [b"abc"]


def test_check_and_wait_see_queues_too() -> None:
    """Check and wait find a queue that is not empty; num_keys and list_keys leave queues out."""
    table = Table()
    assert table.do("check", "q").number == 0
    table.do("push", "q", values=(b"1",))
    assert table.do("check", "q").number == 1
    assert table.do("wait", "q").problem == ""
    assert (table.do("num_keys").number, table.do("list_keys").values) == (0, [])
    table.do("pop", "q")
    assert table.do("check", "q").number == 0


def test_queues_are_first_in_first_out() -> None:
    """Pop returns values in the order of push, until the queue is empty."""
    table = Table()
    for value in (b"1", b"", b"3"):
        table.do("push", "q", values=(value,))
    assert table.do("length", "q").number == 3
    assert [table.do("pop", "q").values[0] for _ in range(3)] == [b"1", b"", b"3"]
    assert table.do("pop", "q").problem == "empty"
    assert table.do("length", "q").number == 0


@pytest.mark.parametrize("op", ["get", "pop"])
def test_an_operation_that_names_no_key_is_answered(op: str) -> None:
    """A request without a key, which no client of ours sends, gets a reply too."""
    assert Table().do(op).problem == "no-such-key"


# Waiting ---------------------------------------------------------------------------------------------------------


def test_waiting_requests_are_released_in_order() -> None:
    """Setting a key releases all requests that wait for it, in the order of the requests."""
    table = Table()
    waiting = [table.park("get", "k"), table.park("wait", "k", owner=YOU), table.park("multi_get", "k", "k")]
    released = table.free("set", "k", values=(b"v",))
    assert [number for number, _ in released] == waiting
    assert [reply.values for _, reply in released] == [[b"v"], [], [b"v", b"v"]]
    assert table.free("set", "k", values=(b"again",)) == []


@pytest.mark.parametrize(
    ("op", "kw", "value"),
    [
        ("set", {"values": (b"v",)}, b"v"),
        ("append", {"values": (b"v",)}, b"v"),
        ("add", {"number": 3}, b"3"),
        ("compare_set", {"values": (b"", b"v")}, b"v"),
        ("multi_set", {"values": (b"v",)}, b"v"),
    ],
)
def test_every_operation_that_creates_a_key_releases(op: str, kw: dict[str, Any], value: bytes) -> None:
    """Every operation that creates a key releases the requests that wait for it."""
    table = Table()
    waiting = table.park("get", "k")
    assert table.free(op, "k", **kw) == [(waiting, StoreReply(waiting, [value]))]


def test_a_wait_for_several_keys_needs_all() -> None:
    """The last missing key releases the request, in whatever order the keys are set."""
    table = Table()
    waiting = table.park("wait", "a", "b", "c")
    assert table.free("set", "c") == []
    assert table.free("set", "a") == []
    assert table.free("set", "b") == [(waiting, StoreReply(waiting))]


def test_one_operation_that_creates_all_keys_releases_once() -> None:
    """multi_set of all awaited keys gives one reply."""
    table = Table()
    waiting = table.park("multi_get", "a", "b")
    released = table.free("multi_set", "a", "b", values=(b"1", b"2"))
    assert released == [(waiting, StoreReply(waiting, [b"1", b"2"]))]


def test_a_key_that_was_deleted_meanwhile_is_waited_for_again() -> None:
    """A wait for two keys, the first of which is deleted and set again, ends when both are present."""
    table = Table()
    table.do("set", "a")
    waiting = table.park("wait", "a", "b")
    table.do("delete", "a")
    assert table.free("set", "b") == []
    assert table.free("set", "a") == [(waiting, StoreReply(waiting))]


def test_a_pushed_value_releases_one_pop() -> None:
    """Each push releases the first waiting pop; a wait for the queue to exist is released after it."""
    table = Table()
    first, second, third = table.park("pop", "q"), table.park("pop", "q"), table.park("wait", "q")
    assert table.free("push", "q", values=(b"1",)) == [(first, StoreReply(first, [b"1"]))]
    assert table.free("push", "q", values=(b"2",)) == [(second, StoreReply(second, [b"2"]))]
    assert table.free("push", "q", values=(b"3",)) == [(third, StoreReply(third))]
    assert table.do("length", "q").number == 1


def test_waits_expire_each_at_its_own_time() -> None:
    """A wait for any number of keys gets one reply "timeout", at its deadline and not before."""
    table = Table()
    long = table.park("get", "a", wait_s=20.0, now=100.0)
    short = table.park("wait", "a", "b", wait_s=5.0, now=100.0)
    assert table.store.expire(104.9) == []
    [(parked, reply)] = table.store.expire(105.0)
    assert (parked.ask.id, parked.owner, reply) == (short, ME, StoreReply(short, problem="timeout"))
    assert table.store.expire(105.0) == []
    assert table.free("multi_set", "a", "b", values=(b"", b"")) == [(long, StoreReply(long, [b""]))]
    assert table.store.expire(1e9) == []


def test_a_queue_wait_expires_as_a_timeout() -> None:
    """A pop with a wait ends with "timeout", one without a wait with "empty"."""
    table = Table()
    waiting = table.park("pop", "q", wait_s=1.0)
    assert [(parked.ask.id, reply.problem) for parked, reply in table.store.expire(1.0)] == [(waiting, "timeout")]


def test_a_closed_owner_is_forgotten() -> None:
    """The waiting requests of an owner are dropped with it and consume no value; those of others remain."""
    table = Table()
    table.park("pop", "q", owner=YOU)
    table.park("wait", "q", "k", owner=YOU)
    mine = table.park("pop", "q", owner=ME)
    table.store.forget(YOU)
    assert table.free("push", "q", values=(b"1",)) == [(mine, StoreReply(mine, [b"1"]))]
    assert table.store.expire(1e9) == []
    assert table.store._parked == {}


# How much is held ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["set", "append", "multi_set", "push", "compare_set"])
def test_a_full_store_refuses_and_keeps_what_it_has(op: str) -> None:
    """A value over the limit is refused; stored values remain, and smaller values still fit."""
    table = Table(most=20)
    table.do("set", "old", values=(b"12345",))
    values = (b"", bytes(20)) if op == "compare_set" else (bytes(20),)
    assert table.do(op, "new", values=values).problem == "full"
    assert (table.do("check", "new").number, table.do("get", "old").values) == (0, [b"12345"])
    assert table.do("set", "new", values=(b"1234",)).problem == ""


def test_a_counter_needs_room_too() -> None:
    """add() to a full store is refused as any other write is."""
    table = Table(most=1)
    assert table.do("add", "n", number=1).problem == "full"
    assert table.do("check", "n").number == 0


@pytest.mark.parametrize("round_trip", ["overwrite", "delete", "queue", "twice"])
def test_room_is_given_back(round_trip: str) -> None:
    """Overwriting, deleting and popping release exactly the bytes that were counted."""
    table = Table(most=64)
    for _ in range(50):
        match round_trip:
            case "overwrite":
                table.do("set", "k", values=(bytes(40),))
                table.do("set", "k", values=(b"",))
            case "delete":
                table.do("set", "k", values=(bytes(40),))
                table.do("delete", "k")
            case "queue":
                table.do("push", "q", values=(bytes(40),))
                table.do("pop", "q")
            case _:
                table.do("multi_set", "k", "k", values=(bytes(10), bytes(20)))
                table.do("delete", "k")
    assert table.do("set", "other", values=(bytes(59 - len("k")),)).problem == ""


# Against a model -------------------------------------------------------------------------------------------------


class Model:
    """A plain model of the store: one list of waiting requests, searched from the front."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.waiting: list[tuple[object, StoreRequest, float]] = []

    def ready(self, ask: StoreRequest) -> bool:
        """Tell whether ``ask`` can be answered."""
        match ask.op:
            case "get" | "multi_get":
                return all(key in self.values for key in ask.keys)
            case "wait":
                return all(key in self.values or self.queues.get(key) for key in ask.keys)
            case "pop":
                return bool(self.queues.get(ask.keys[0]))
            case _:
                return True

    def answer(self, ask: StoreRequest) -> Any:
        """Carry out ``ask``, which is ready; return what it should reply."""
        key, values = (ask.keys or [""])[0], ask.values
        there = self.values.get(key)
        match ask.op:
            case "set" | "multi_set":
                self.values |= dict(zip(ask.keys, values, strict=True))
            case "append":
                self.values[key] = (there or b"") + values[0]
            case "get" | "multi_get":
                return [self.values[name] for name in ask.keys]
            case "check":
                return all(name in self.values or self.queues.get(name) for name in ask.keys)
            case "add":
                try:
                    total = int(there or b"0") + ask.number if there is None or there else int("")
                except ValueError:
                    return "not-a-number"
                self.values[key] = b"%d" % total
                return total
            case "compare_set":
                if there == values[0] or (there is None and values[0] == b""):
                    self.values[key] = values[1]
                    return [values[1]]
                return [values[0] if there is None else there]
            case "delete":
                return self.values.pop(key, None) is not None
            case "num_keys":
                return len(self.values)
            case "list_keys":
                return sorted(name.encode() for name in self.values)
            case "push":
                self.queues.setdefault(key, deque()).append(values[0])
            case "pop":
                return [self.queues[key].popleft()]
            case "length":
                return len(self.queues.get(key, ()))
        return None

    def handle(self, owner: object, ask: StoreRequest, now: float) -> tuple[Any, set[tuple[int, str]]]:
        """Carry out ``ask``; return its reply ("parked" where it waits) and the released, as (id, reply)."""
        if not self.ready(ask):
            if ask.wait_s <= 0:
                return ("empty" if ask.op == "pop" else "timeout"), set()
            self.waiting.append((owner, ask, now + ask.wait_s))
            return "parked", set()
        reply = self.answer(ask)
        released = set()
        for entry in list(self.waiting):
            if self.ready(entry[1]):
                self.waiting.remove(entry)
                released.add((entry[1].id, repr(self.answer(entry[1]))))
        return reply, released


def plain(ask: StoreRequest, reply: StoreReply | None) -> Any:
    """Return a reply as the model writes it."""
    if reply is None:
        return "parked"
    if reply.problem:
        return reply.problem
    match ask.op:
        case "get" | "multi_get" | "compare_set" | "pop":
            return reply.values
        case "list_keys":
            return sorted(reply.values)
        case "check" | "delete":
            return bool(reply.number)
        case "add" | "num_keys" | "length":
            return reply.number
        case _:
            return None


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"", b"1", b"-7", b"x", b"longer"])


@st.composite
def operations(draw: st.DrawFn) -> tuple[str, list[str], list[bytes], int, float]:
    """Return any operation with arguments that a store would send for it."""
    op = draw(st.sampled_from(get_args(StoreOp)))
    many = op in {"wait", "check", "multi_get", "multi_set"}
    keys = draw(st.lists(KEYS, max_size=3)) if many else [draw(KEYS)]
    number = {"multi_set": len(keys), "compare_set": 2}.get(op, 1)
    values = draw(st.lists(VALUES, min_size=number, max_size=number))
    return op, keys, values, draw(st.integers(-3, 3)), draw(st.sampled_from([0.0, 1.0, 5.0]))


STEPS = st.lists(st.one_of(operations(), st.sampled_from(["later", "forget"])), max_size=40)


@given(STEPS)
def test_any_sequence_of_operations_matches_the_model(steps: list[Any]) -> None:
    """Replies, parked, released and expired requests are those of the plain model, step by step."""
    store, model, now = KeyValue(), Model(), 0.0
    for number, step in enumerate(steps):
        owner = (ME, YOU)[number % 2]
        if step == "later":
            now += 2.0
            expired = {parked.ask.id for parked, _ in store.expire(now)}
            assert expired == {ask.id for _, ask, deadline in model.waiting if deadline <= now}
            model.waiting = [entry for entry in model.waiting if entry[2] > now]
        elif step == "forget":
            store.forget(owner)
            model.waiting = [entry for entry in model.waiting if entry[0] != owner]
        else:
            op, keys, values, amount, wait_s = step
            ask = StoreRequest(number, op, keys, values, amount, wait_s)
            reply, released = store.handle(owner, ask, now)
            expected, freed = model.handle(owner, ask, now)
            assert plain(ask, reply) == expected
            assert {(parked.ask.id, repr(plain(parked.ask, answer))) for parked, answer in released} == freed
    held = sum(len(key) + len(value) for key, value in model.values.items())
    assert store._held == held + sum(len(value) for queue in model.queues.values() for value in queue)
    assert bool(store._parked) == any(ask.keys for _, ask, _ in model.waiting)
