"""A node that is lost: what was seen of its end, and the words for it."""

from __future__ import annotations

import msgspec

from ...diagnosis import duration, ranks

__all__ = ["PATIENCE_S", "SILENT_S", "Loss", "silence", "words_of"]

# Once a job is to end, an agent needs --grace and a moment to tell its story, and node 0 a moment for its verdict. One
# that takes this much longer is reported as silent, so that a stopped agent does not hold up everyone else's end.
PATIENCE_S = 15.0

# Agents hear from each other every second; after this much silence people are told, while nothing is to end.
SILENT_S = 5.0


def silence(name: str, quiet_s: float) -> str:
    """Say that the agent of the node ``name`` is silent."""
    return f"{name}: its agent has not answered for {duration(quiet_s)} (it may be stopped)"


class Loss(msgspec.Struct, frozen=True):
    """The end of the connection to a node's agent, or its silence; ``at_s`` is when it was last heard."""

    node: int
    host: str
    address: str
    ranks: tuple[int, ...]
    how: str
    at_s: float
    seen_s: float
    # Whether its end was seen (a connection that broke), and not only concluded from silence.
    observed: bool = True
    # Whether this node is the one that is cut off: the others are lost to it, and it to them.
    cut_off: bool = False

    def __str__(self) -> str:
        return f"node {self.node} ({', '.join(part for part in (self.host, self.address) if part)})"

    @property
    def what(self) -> str:
        """Return the verdict's first line about it."""
        if not self.observed:
            return f"{self} does not answer"
        return f"{self} was lost" + (f", and {ranks(self.ranks)} with it" if self.ranks else "")


def words_of(loss: Loss) -> tuple[str, str]:
    """Return why it is taken to be lost, and what to do."""
    place = loss.host or loss.address
    quiet = duration(max(0.0, loss.seen_s - loss.at_s))
    if not loss.observed:
        lacks = "gave no verdict" if loss.cut_off else "did not say how its ranks ended"
        return (
            f"its agent {lacks}; last heard {quiet} ago (inferred from silence: it may live)",
            f"look at the agent on {place}: it may be stopped or starved (ps -o stat)",
        )
    why = f"{loss.how} (observed); it was last heard {quiet} before"
    if any(word in loss.how.lower() for word in ("timed out", "unreachable", "no route")):
        fix = f"see that {place} is up and its network is (ping, ip link); it may be alive and cut off"
    else:
        fix = f"look at the end of the agent's output on {place}, and at its kernel log (dmesg)"
    if loss.cut_off:
        why += "; without it nobody decides about the job, so this node ended its ranks"
    return why, fix
