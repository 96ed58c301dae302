"""The ports on which a worker listens, while it opens and closes other descriptors."""

from __future__ import annotations

import os
import socket
import threading

from allhands.doctor import proc_status


def test_listening_ports_while_descriptors_change() -> None:
    """A descriptor that is closed meanwhile does not hide the port on which the process listens."""
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
            found = [proc_status._listening_ports(os.getpid()) for _ in range(300)]
        finally:
            over.set()
            thread.join()
    assert all(port in each for each in found)
