from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from allhands.control import process_identity, rendezvous
from allhands.control.rendezvous import (
    Announcement,
    FileRendezvous,
    local_socket_name,
    outbound_address,
    random_socket_name,
)
from allhands.errors import ConnectError

# No process has this number: it is above the largest that Linux gives out.
NOBODY = 2**22 + 1


def announcement(pid: int | None = None, token: bytes = b"secret") -> Announcement:
    """Return an announcement of a coordinator on this host: this process by default."""
    return Announcement.of("allhands-x", "10.0.0.1", 4021, os.getpid() if pid is None else pid, token)


# The announcement ------------------------------------------------------------------------------------------------


def test_an_announcement_of_a_living_process_is_not_dead() -> None:
    """A coordinator that runs on this host is alive."""
    assert announcement().here
    assert not announcement().dead


def test_an_announcement_of_no_process_is_dead() -> None:
    """A coordinator whose process has ended is dead."""
    assert announcement(pid=NOBODY).dead


def test_an_announcement_of_a_reused_pid_is_dead() -> None:
    """A process with the same pid that started at another time is another process."""
    old = msgspec.structs.replace(announcement(), started=announcement().started - 60)
    assert old.dead


def test_an_announcement_from_another_host_is_never_dead() -> None:
    """A process on another host may be alive."""
    elsewhere = msgspec.structs.replace(announcement(pid=NOBODY), key="another kernel")
    assert not elsewhere.here
    assert not elsewhere.dead


# The file --------------------------------------------------------------------------------------------------------


def test_a_published_announcement_is_read_by_others(tmp_path: Path) -> None:
    """Another rank reads from the file what rank 0 published, token included."""
    posted = announcement()
    FileRendezvous(str(tmp_path / "meet")).publish(posted)
    assert FileRendezvous(str(tmp_path / "meet")).read() == posted


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_nothing_is_published_yet(tmp_path: Path, content: bytes | None) -> None:
    """An absent file, or an empty one that the user created, has no announcement, and rank 0 may publish."""
    path = tmp_path / "meet"
    if content is not None:
        path.write_bytes(content)
    place = FileRendezvous(str(path))
    assert place.read() is None
    place.prepare()


@pytest.mark.parametrize(
    "content",
    [
        b"\x07\x00\x00\x00\x00\x00\x00\x00default",
        b"rank 0 was here",
        b"{}",
        b"[1, 2]",
        announcement().pack()[:-1],
        announcement().pack().replace(b"allhands-rendezvous-1", b"allhands-rendezvous-9"),
        announcement().pack().replace(b"allhands-x", b"allhands-\xff"),
        b"[" * 100_000,
    ],
    ids=["file-store", "text", "empty-object", "array", "cut-off", "other-mark", "no-utf-8", "deep"],
)
def test_a_file_with_other_content_is_stale(tmp_path: Path, content: bytes) -> None:
    """A file with other content is never read as an announcement and never overwritten."""
    path = tmp_path / "meet"
    path.write_bytes(content)
    place = FileRendezvous(str(path))
    for step in (place.read, place.prepare):
        with pytest.raises(ConnectError) as caught:
            step()
        assert caught.value.slug == "stale-file"
        assert str(path) in caught.value.diagnosis.what
        assert f"{len(content)} bytes" in caught.value.diagnosis.why
    assert path.read_bytes() == content


def test_a_path_that_is_no_file_is_unusable(tmp_path: Path) -> None:
    """The error for a path that cannot be read or written has the answer of the file system."""
    place = FileRendezvous(str(tmp_path))
    with pytest.raises(ConnectError, match="Is a directory") as caught:
        place.read()
    assert caught.value.slug == "stale-file"
    missing = FileRendezvous(str(tmp_path / "no" / "meet"))
    assert missing.read() is None
    with pytest.raises(ConnectError, match="No such file") as caught:
        missing.publish(announcement())
    assert caught.value.slug == "stale-file"


def test_a_dead_announcement_is_replaced(tmp_path: Path) -> None:
    """The announcement of a dead coordinator is recognised, and the next rank 0 replaces it."""
    place = FileRendezvous(str(tmp_path / "meet"))
    place.publish(announcement(pid=NOBODY))
    fresh = FileRendezvous(str(tmp_path / "meet"))
    fresh.prepare()
    living = announcement()
    fresh.publish(living)
    assert place.read() == living


def test_a_living_announcement_is_not_replaced(tmp_path: Path) -> None:
    """A file whose coordinator runs belongs to that job; the process is named."""
    FileRendezvous(str(tmp_path / "meet")).publish(announcement())
    with pytest.raises(ConnectError) as caught:
        FileRendezvous(str(tmp_path / "meet")).prepare()
    assert (caught.value.slug, caught.value.ranks) == ("file-in-use", (0,))
    assert f"pid {os.getpid()}" in caught.value.diagnosis.who


def test_an_announcement_from_another_host_may_be_replaced(tmp_path: Path) -> None:
    """A coordinator on another host cannot be checked, so its announcement does not block the file for ever."""
    place = FileRendezvous(str(tmp_path / "meet"))
    place.publish(msgspec.structs.replace(announcement(), key="another kernel"))
    place.prepare()
    fresh = announcement()
    place.publish(fresh)
    assert place.read() == fresh


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    """The file carries a token, so it has mode 0600, whatever the umask and whatever was there before."""
    path = tmp_path / "meet"
    path.touch(mode=0o666)
    before = os.umask(0)
    try:
        FileRendezvous(str(path)).publish(announcement())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_clear_removes_the_own_announcement(tmp_path: Path) -> None:
    """clear() removes the file; a second call, or one without a file, does nothing."""
    path = tmp_path / "meet"
    place = FileRendezvous(str(path))
    place.clear()
    place.publish(announcement())
    place.clear()
    assert not path.exists()
    place.clear()


def test_clear_leaves_the_announcement_of_others(tmp_path: Path) -> None:
    """A file that another job has replaced remains."""
    path = tmp_path / "meet"
    first, second = FileRendezvous(str(path)), FileRendezvous(str(path))
    theirs = announcement(token=b"2")
    first.publish(announcement(token=b"1"))
    second.publish(theirs)
    first.clear()
    assert second.read() == theirs
    FileRendezvous(str(path)).clear()
    assert path.exists()


def test_an_announcement_is_never_read_in_part(tmp_path: Path) -> None:
    """While announcements replace each other, a reader sees a complete one, and no temporary file remains."""
    path = tmp_path / "meet"
    place = FileRendezvous(str(path))
    place.publish(announcement())
    done = threading.Event()

    def post() -> None:
        for length in range(300):
            place.publish(announcement(token=b"t" * (length * 50)))
        done.set()

    thread = threading.Thread(target=post)
    thread.start()
    seen = set()
    while not done.is_set():
        found = FileRendezvous(str(path)).read()
        assert found is not None
        seen.add(len(found.token))
    thread.join()
    assert seen
    assert [entry.name for entry in tmp_path.iterdir()] == ["meet"]


def test_an_announcement_that_cannot_be_published_leaves_no_file(tmp_path: Path) -> None:
    """If the file cannot be replaced, the temporary one is removed."""
    path = tmp_path / "meet"
    path.mkdir()
    with pytest.raises(ConnectError):
        FileRendezvous(str(path)).publish(announcement())
    assert [entry.name for entry in tmp_path.iterdir()] == ["meet"]


# Which file system -----------------------------------------------------------------------------------------------

MOUNTS = """\
overlay / overlay rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sda1 /home/ada ext4 rw 0 0
server:/odd /srv/a\\040b nfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
"""


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernel's list of mounts by the one above."""
    real = Path.read_text

    def read_text(path: Path, *args: str, **kw: str) -> str:
        return MOUNTS if str(path) == "/proc/mounts" else real(path, *args, **kw)

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize(
    ("path", "wide"),
    [
        ("/srv/meet", False),
        ("/home/meet", True),
        ("/home/bob/meet", True),
        ("/home/ada/meet", False),
        ("/home/adam/meet", True),
        ("/srv/a b/meet", True),
        ("/dev/shm/meet", False),
        ("/homes/meet", False),
    ],
)
@pytest.mark.usefixtures("mounts")
def test_a_network_file_system_is_wide(path: str, *, wide: bool) -> None:
    """A file on a file system that other hosts may share is wide; the longest mount that holds it decides."""
    assert FileRendezvous(path).wide is wide


@pytest.mark.usefixtures("mounts")
def test_a_link_is_resolved_before_the_file_system_is_read(tmp_path: Path) -> None:
    """A path through a symbolic link is on the file system that the link leads to."""
    (tmp_path / "link").symlink_to("/home/bob")
    assert FileRendezvous(str(tmp_path / "link" / "meet")).wide


def test_an_unknown_file_system_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file system is unknown, other hosts may share it."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert FileRendezvous("/srv/meet").wide


# Names -----------------------------------------------------------------------------------------------------------


def test_the_local_name_follows_the_job_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one job and user derive one name; another job, or another user, another."""
    name = local_socket_name("job 1")
    assert local_socket_name("job 1") == name
    assert local_socket_name("job 2") != name
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert local_socket_name("job 1") != name


def test_the_local_name_without_a_job_follows_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job name, ranks that one process started meet, and no others."""
    name = local_socket_name("")
    assert local_socket_name("") == name
    one = process_identity.this_process()
    other = process_identity.Identity(one.host, one.key, one.pid, one.started, "another parent")
    monkeypatch.setattr(rendezvous, "this_process", lambda: other)
    assert local_socket_name("") != name


def test_local_names_can_be_socket_names() -> None:
    """Names fit into a Unix socket's address (108 bytes with the leading NUL), and random ones differ."""
    assert random_socket_name() != random_socket_name()
    for name in (local_socket_name("j" * 1000), random_socket_name()):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("\0" + name)


def test_outbound_address_is_an_address_of_this_host() -> None:
    """The address at which others reach this host can be bound here."""
    address = outbound_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        assert sock.getsockname()[0] == address
