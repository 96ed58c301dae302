"""Who holds that port: the process that makes "address already in use" true."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Holder", "holder"]

# A command line can be pages long; its beginning is what a person recognises.
_MOST_COMMAND = 120


class Holder(NamedTuple):
    """A process that listens on a port; pid 0 where the kernel does not tell (another user's)."""

    pid: int
    command: str
    user: str

    def __str__(self) -> str:
        if not self.pid:
            return "a process of another user (its pid is not visible from here)"
        return f"pid {self.pid} of {self.user} ({self.command[:_MOST_COMMAND]})"

    @property
    def ours(self) -> bool:
        """Whether it is an allhands coordinator beside some rank 0."""
        return "allhands.control" in self.command


def holder(port: int) -> Holder | None:
    """Return who listens on TCP ``port`` on this host, or None where nobody does."""
    found = _look(port)
    # The system's tables are read one after the other while others change them: a socket that was opened in between
    # has no process yet, and a line may be passed over. Whoever asks knows that the port is taken.
    return found if found is not None and found.pid else _look(port) or found


def _look(port: int) -> Holder | None:
    import psutil  # only on the error path: it costs 10 ms of start-up

    for entry in psutil.net_connections(kind="tcp"):
        if entry.status != psutil.CONN_LISTEN or not entry.laddr or entry.laddr.port != port:
            continue
        if entry.pid is None:
            return Holder(0, "", "")
        try:
            process = psutil.Process(entry.pid)
            command = " ".join(process.cmdline()) or process.name()
            return Holder(entry.pid, command, process.username())
        except psutil.Error:
            return Holder(entry.pid, "?", "?")
    return None
