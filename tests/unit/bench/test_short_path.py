from __future__ import annotations

import socket
from pathlib import Path

from allhands.bench.processes import short_path


def test_a_socket_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    """A command and its ranks meet in folders whose names are longer than the address of a socket may be."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with short_path(folder) as place:
            listener.bind(f"{place}/socket")
        listener.listen()
        with short_path(folder) as place:
            caller.connect(f"{place}/socket")
        listener.accept()[0].close()
    assert (folder / "socket").is_socket()
