from __future__ import annotations

import errno
import signal

import pytest

_core = pytest.importorskip("allhands._core", reason="the C core is built on Linux only")


def test_parent_death_signal_is_set_and_cleared() -> None:
    """A signal that exists, and 0 for none, are accepted."""
    try:
        assert _core.set_parent_death_signal(signal.SIGTERM) == 0
    finally:
        assert _core.set_parent_death_signal(0) == 0


@pytest.mark.parametrize("number", [-1, -(2**31), 65, 2**31 - 1])
def test_parent_death_signal_refuses_what_is_no_signal(number: int) -> None:
    """A number that is no signal returns EINVAL."""
    assert _core.set_parent_death_signal(number) == errno.EINVAL


@pytest.mark.parametrize(
    ("arguments", "kind"), [((), TypeError), (("1",), TypeError), ((1, 2), TypeError), ((2**31,), OverflowError)]
)
def test_wrong_arguments_raise(arguments: tuple[object, ...], kind: type[Exception]) -> None:
    """A wrong number, type or size of argument raises as in any Python function."""
    with pytest.raises(kind):
        _core.set_parent_death_signal(*arguments)
