"""Hosts for a bench on one machine: network namespaces that are joined by a switch. Needs no torch.

They have no names: each lives as long as its descriptor here or a process inside it, so that nothing is left of them
however the bench ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from ..errors import AllhandsError, fail

__all__ = ["PORT", "Network", "address"]

# <linux/sched.h>; the standard library has it from 3.12 on.
_CLONE_NEWNET = 0x40000000

# Any will do: nothing else listens in a namespace that was just made, and nobody outside sees its addresses.
PORT = 29500

_T = TypeVar("_T")


def address(host: int) -> str:
    """Return the address of a host on the network that they share."""
    return f"10.77.0.{host + 1}"


class Network:
    """Hosts while a block runs. Raises namespaces-refused where they cannot be made."""

    def __init__(self, hosts: int) -> None:
        self._number = hosts
        self._hosts: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._forget()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise _refused("`ip` is not installed (apt-get install iproute2)")
        switch = self._namespace()
        self._hosts.append(switch)
        self._ip(switch, "link add br0 type bridge", "link set br0 up")
        for number in range(self._number):
            host = self._namespace()
            self._hosts.append(host)
            self._ip(
                switch,
                f"link add port{number} type veth peer name eth0 netns /proc/self/fd/{host}",
                f"link set port{number} master br0 up",
            )
            self._ip(host, "link set lo up", f"addr add {address(number)}/24 dev eth0", "link set eth0 up")

    def within(self, host: int, make: Callable[[], _T]) -> _T:
        """Return what ``make`` returns on a host; a process that it starts stays there."""
        return _within(self._hosts[1 + host], make)

    def _namespace(self) -> int:
        def make() -> int:
            _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        return _aside(make)

    def _ip(self, namespace: int, *lines: str) -> None:
        for line in lines:
            done = _within(
                namespace,
                lambda line=line: subprocess.run(  # type: ignore[misc]  # a default that mypy does not see through
                    ["ip", *line.split()],  # noqa: S607  # whichever is on PATH
                    capture_output=True,
                    text=True,
                    check=False,
                    pass_fds=self._hosts,
                ),
            )
            if done.returncode:
                raise _refused(f"ip {line}: {done.stderr.strip()}")

    def _forget(self) -> None:
        while self._hosts:
            os.close(self._hosts.pop())


def _within(namespace: int, make: Callable[[], _T]) -> _T:
    def enter() -> _T:
        _check(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET))
        return make()

    return _aside(enter)


def _aside(make: Callable[[], _T]) -> _T:
    """Return what ``make`` returns in a thread of its own, which is the only one that moves."""
    made: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for problem in problems:
        raise problem
    return made[0]


def _check(code: int) -> None:
    if code:
        raise _refused(f"the kernel says: {os.strerror(ctypes.get_errno())}")


def _refused(why: str) -> AllhandsError:
    return fail(
        "namespaces-refused",
        "--hosts needs network namespaces as hosts, and they cannot be made here",
        who=f"allhands bench (pid {os.getpid()}, user {os.getuid()})",
        why=why,
        fix="run it as root, or in a namespace of its own: `unshare --user --map-root-user --net allhands bench ...`; "
        "or measure without --hosts",
    )
