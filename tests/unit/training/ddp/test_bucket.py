from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allhands.training.ddp.bucket import ItemSize, assign, place

items = st.lists(
    st.builds(
        ItemSize,
        numel=st.integers(0, 5000),
        element_bytes=st.sampled_from([2, 4, 8]),
        kind=st.sampled_from(["a", "b"]),
        sparse=st.booleans(),
    ),
    min_size=1,
    max_size=30,
).map(lambda found: [item._replace(element_bytes=4 if item.kind == "a" else 8) for item in found])


def test_buckets_are_closed_once_they_are_full() -> None:
    """Each bucket has its own cap, and gradients are assigned in the given order."""
    sizes = [ItemSize(100, 4, "f")] * 6
    assert assign(sizes, [5, 4, 3, 2, 1, 0], [400, 800]) == [[5], [4, 3], [2, 1], [0]]


def test_kinds_do_not_share_andsparse_ones_have_their_own() -> None:
    """A bucket has one dtype and device; open buckets follow in the order of their last gradient."""
    sizes = [ItemSize(1, 4, "f"), ItemSize(1, 8, "d"), ItemSize(1, 4, "f", sparse=True), ItemSize(1, 4, "f")]
    assert assign(sizes, range(4), [1 << 20]) == [[2], [1], [0, 3]]


@given(items, st.randoms(use_true_random=False), st.lists(st.integers(1, 30_000), min_size=1, max_size=3))
def test_every_gradient_has_one_place(sizes: list[ItemSize], random: object, caps: list[int]) -> None:
    """Each gradient is in one bucket, regions of a kind do not overlap, and each has space for its counter."""
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = assign(sizes, order, caps)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    assert all(len({sizes[index].kind for index in bucket}) == 1 for bucket in buckets)
    ends: dict[object, int] = {}
    for number, found in place(sizes, buckets):
        members = buckets[number]
        kind = sizes[members[0]].kind
        assert found.start == ends.get(kind, 0)
        assert found.numel == sum(sizes[index].numel for index in members)
        assert found.reserved > found.numel
        assert found.start * sizes[members[0]].element_bytes % 64 == 0
        ends[kind] = found.start + found.reserved
