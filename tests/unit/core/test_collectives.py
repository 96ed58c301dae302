from __future__ import annotations

import errno
import os
import signal
import socket

import pytest

_core = pytest.importorskip("allhands._core", reason="the C core is built on Linux only")


def test_peer_credentials_are_those_of_the_other_end() -> None:
    """Both ends of a socket pair belong to this very process."""
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert _core.peer_credentials(left.fileno()) == (os.getpid(), os.getuid(), os.getgid())
        assert _core.peer_credentials(right.fileno()) == _core.peer_credentials(left.fileno())


def test_peer_credentials_of_an_unconnected_socket_are_refused() -> None:
    """A socket without a peer is an error, not a peer with invented ids."""
    with socket.socket(socket.AF_UNIX) as alone, pytest.raises(OSError) as caught:
        _core.peer_credentials(alone.fileno())
    assert caught.value.errno == errno.ENOTCONN


def test_peer_credentials_of_a_tcp_socket_are_refused() -> None:
    """TCP knows no peer process, and that is an error rather than an answer."""
    with socket.socket(socket.AF_INET) as tcp, pytest.raises(OSError) as caught:
        _core.peer_credentials(tcp.fileno())
    assert caught.value.errno == errno.ENOTCONN


@pytest.mark.parametrize(("fd", "code"), [(-1, errno.EBADF), (2**31 - 1, errno.EBADF)])
def test_peer_credentials_of_no_descriptor_are_refused(fd: int, code: int) -> None:
    """A descriptor that is not open is an OSError with the kernel's own code."""
    with pytest.raises(OSError) as caught:
        _core.peer_credentials(fd)
    assert caught.value.errno == code


def test_peer_credentials_of_a_file_are_refused() -> None:
    """A descriptor that is no socket is an OSError with the kernel's own code."""
    read, write = os.pipe()
    try:
        with pytest.raises(OSError) as caught:
            _core.peer_credentials(read)
        assert caught.value.errno == errno.ENOTSOCK
    finally:
        os.close(read)
        os.close(write)


def test_parent_death_signal_is_set_and_cleared() -> None:
    """A signal the kernel knows, and 0 for none, are taken."""
    try:
        assert _core.set_parent_death_signal(signal.SIGTERM) == 0
    finally:
        assert _core.set_parent_death_signal(0) == 0


@pytest.mark.parametrize("number", [-1, -(2**31), 65, 2**31 - 1])
def test_parent_death_signal_refuses_what_is_no_signal(number: int) -> None:
    """A number that is no signal comes back as EINVAL."""
    assert _core.set_parent_death_signal(number) == errno.EINVAL


@pytest.mark.parametrize("function", ["set_parent_death_signal", "peer_credentials"])
@pytest.mark.parametrize(
    ("arguments", "kind"), [((), TypeError), (("1",), TypeError), ((1, 2), TypeError), ((2**31,), OverflowError)]
)
def test_wrong_arguments_raise(function: str, arguments: tuple[object, ...], kind: type[Exception]) -> None:
    """A wrong number, type or size of argument raises as in any Python function."""
    with pytest.raises(kind):
        getattr(_core, function)(*arguments)
