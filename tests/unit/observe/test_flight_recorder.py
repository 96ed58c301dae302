from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from allhands import _core
from allhands.observe import flight_recorder


@pytest.mark.parametrize("case", ["right", "another pid", "a plain file", "too small", "not sealed", "closed", "words"])
def test_the_launchers_board(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board of the launcher is taken only by the process it was made for, and only if it is whole and sealed."""
    pid = os.getpid() + (case == "another pid")
    if case == "a plain file":
        descriptor = os.open(tmp_path / "board", os.O_CREAT | os.O_RDWR)
        os.ftruncate(descriptor, _core.board_bytes())
    elif case in {"too small", "not sealed"}:
        descriptor = os.memfd_create("allhands-board")
        os.ftruncate(descriptor, 64 if case == "too small" else _core.board_bytes())
    else:
        descriptor = flight_recorder.make()
    monkeypatch.setenv("ALLHANDS_BOARD_FD", "some:thing" if case == "words" else f"{descriptor}:{pid}")
    if case == "closed":
        os.close(descriptor)
    assert flight_recorder._given() == (descriptor if case == "right" else None)
    if case != "closed":
        os.close(descriptor)


def test_a_board_that_nobody_wrote() -> None:
    """The memory of a worker that used no group is no board."""
    descriptor = flight_recorder.make()
    try:
        with pytest.raises(LookupError):
            flight_recorder.parse(1, descriptor)
        _core.Board(descriptor)
        assert flight_recorder.parse(1, descriptor).notes == ()
    finally:
        os.close(descriptor)


def refuse(*_: object) -> str:
    """Say what the kernel says of another user's descriptors, and of those of a process that has just ended."""
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(("there", "problem"), [(True, PermissionError), (False, LookupError)])
def test_a_process_that_ends_while_its_board_is_looked_for(
    there: bool, problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended has no board; only one that is still there is another user's."""
    monkeypatch.setattr(os, "readlink", refuse)
    monkeypatch.setattr(os.path, "exists", lambda _: there)
    with pytest.raises(problem):
        flight_recorder.read(os.getpid())
    assert flight_recorder.owned(os.getpid()) is None


def test_a_board_that_is_closed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is gone between finding and opening it is no board."""
    monkeypatch.setattr(flight_recorder, "_find", lambda pid: [f"/proc/{pid}/fd/nothing"])
    with pytest.raises(LookupError):
        flight_recorder.read(os.getpid())
