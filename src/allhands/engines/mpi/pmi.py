"""The process manager that MPICH asks at its start (PMI, version 1), in the rank itself and on the job's store.

MPICH's ranks learn of each other by a few lines of text on a descriptor that their mpirun gave them. Where there was no
mpirun, one thread of the rank answers at the other end. So they find each other wherever the control plane reaches.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

__all__ = ["Manager"]

# What keys and values may have; the store takes far more, and MPICH cuts its addresses to fit.
_MAXES = "kvsname_max=256 keylen_max=64 vallen_max=1024"


class Manager:
    """Answers the MPI library of this process, from when it is made to the process's end.

    Where the group ends meanwhile, it falls silent: MPICH would end the process at a refusal, and nobody would be told
    why. Whoever waits for the library to start has to look for himself.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._barriers = 0
        self._own, self._theirs = socket.socketpair()
        self.environment = {
            "PMI_FD": str(self._theirs.fileno()),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(size),
        }
        threading.Thread(target=self._serve, name="allhands-pmi", daemon=True).start()

    def _serve(self) -> None:
        with self._own.makefile("rb") as lines:
            for line in lines:
                try:
                    answer = self._answer(line.decode().rstrip("\n"))
                except Exception:  # noqa: BLE001  # the group is over, or its end has come: see the class
                    return
                self._own.sendall(f"{answer}\n".encode())

    def _answer(self, line: str) -> str:
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        match words.get("cmd", ""):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return f"cmd=maxes {_MAXES} rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                return "cmd=my_kvsname kvsname=allhands rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={self._size} rc=0"
            case "put":
                self._store.set(words["key"], line.partition("value=")[2])
                return "cmd=put_result rc=0 msg=success"
            case "get":
                if not self._store.check([words["key"]]):
                    return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                return f"cmd=get_result rc=0 msg=success value={self._store.get(words['key']).decode()}"
            case "barrier_in":
                self._meet()
                return "cmd=barrier_out rc=0"
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case other:
                return f"cmd={other}_result rc=-1 msg=not_supported"

    def _meet(self) -> None:
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self._store.add(key, 1) == self._size:
            self._store.set(f"{key}/over", b"1")
        self._store.wait([f"{key}/over"])
