"""The ports that a worker holds, while it opens and closes others."""

from __future__ import annotations

import os
import socket
import threading

from allhands.doctor import leftovers


def test_ports_of_a_process_whose_descriptors_come_and_go() -> None:
    """One closed while it is being looked at does not hide the port that is held."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            made = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
            for each in made:
                os.close(each)

    thread = threading.Thread(target=churn)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread.start()
        try:
            found = [leftovers._listens(os.getpid()) for _ in range(300)]
        finally:
            over.set()
            thread.join()
    assert all(port in each for each in found)
