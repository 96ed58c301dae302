"""A rank of a bench ends with its command, whichever way the connection between them ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

# Far above the time to end: this machine may be busy.
DEADLINE_S = 20.0

RANK = """
import sys
from allhands.bench.processes import CommandConnection

line = CommandConnection(sys.argv[1])
print("here", flush=True)
line.tell(rank=0, wait=True)
while sys.argv[2] == "talking":
    line.tell(rank=0)
print("answered", flush=True)
line.tell(rank=0, wait=True)
"""


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "words unread"])
@pytest.mark.parametrize("manner", ["talking", "waiting"])
def test_it_ends_with_the_connection(tmp_path: Path, manner: str, *, unread: bool) -> None:
    """Closed, reset because a killed command had not read everything, or broken under words on their way."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        rank = subprocess.Popen([sys.executable, "-c", RANK, str(folder), manner], stdout=subprocess.PIPE, text=True)
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "here\n"
            with Connection(server.accept()[0].detach()) as connection:
                assert connection.recv_bytes()
                if manner == "talking" or unread:
                    connection.send_bytes(b".")
                if unread:
                    # Until a message is there that will not be read.
                    assert connection.poll(DEADLINE_S)
            assert rank.wait(DEADLINE_S) == 1
        finally:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    assert not folder.exists()
