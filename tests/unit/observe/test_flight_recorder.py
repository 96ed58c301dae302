from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from allhands import _core
from allhands.observe import flight_recorder


@pytest.mark.parametrize("case", ["right", "another pid", "a plain file", "too small", "not sealed", "closed", "words"])
def test_recorder_of_the_launcher(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's descriptor is used only by the process it was made for, and only if it is whole and sealed."""
    pid = os.getpid() + (case == "another pid")
    if case == "a plain file":
        descriptor = os.open(tmp_path / "recorder", os.O_CREAT | os.O_RDWR)
        os.ftruncate(descriptor, _core.flight_recorder_bytes())
    elif case in {"too small", "not sealed"}:
        descriptor = os.memfd_create("allhands-recorder")
        os.ftruncate(descriptor, 64 if case == "too small" else _core.flight_recorder_bytes())
    else:
        descriptor = flight_recorder.make()
    monkeypatch.setenv("ALLHANDS_RECORDER_FD", "some:thing" if case == "words" else f"{descriptor}:{pid}")
    if case == "closed":
        os.close(descriptor)
    assert flight_recorder._given() == (descriptor if case == "right" else None)
    if case != "closed":
        os.close(descriptor)


def test_empty_memory_is_no_recorder() -> None:
    """The memory of a worker that used no group is not parsed as a flight recorder."""
    descriptor = flight_recorder.make()
    try:
        with pytest.raises(LookupError):
            flight_recorder.parse(1, descriptor)
        _core.FlightRecorder(descriptor)
        assert flight_recorder.parse(1, descriptor).entries == ()
    finally:
        os.close(descriptor)


def refuse(*_: object) -> str:
    """Raise the error of the kernel for another user's descriptors, and for those of a process that has just ended."""
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(("there", "problem"), [(True, PermissionError), (False, LookupError)])
def test_process_that_ends_during_the_search(
    there: bool, problem: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PermissionError is raised only if the process still exists; otherwise LookupError."""
    monkeypatch.setattr(os, "readlink", refuse)
    monkeypatch.setattr(os.path, "exists", lambda _: there)
    with pytest.raises(problem):
        flight_recorder.read(os.getpid())
    assert flight_recorder.read_owned(os.getpid()) is None


def test_recorder_closed_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed between finding and opening it raises LookupError."""
    monkeypatch.setattr(flight_recorder, "open_memfds", lambda pid, _: [f"/proc/{pid}/fd/nothing"])
    with pytest.raises(LookupError):
        flight_recorder.read(os.getpid())
