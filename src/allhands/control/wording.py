"""Who answers a roll call, in words: ranks with a coordinator, or the nodes of a job with the launcher of node 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ..diagnosis import by_host, ranks

__all__ = ["NODES", "RANKS", "Party"]


class Party(msgspec.Struct, frozen=True):
    """What those who answer are called, and where what they claim was written."""

    noun: str
    # How many there are in all, and where each learns it.
    size: str
    size_from: str
    # Where each learns its own number, and where the coordinator's address and port.
    number_from: str
    address_from: str
    port_from: str
    timeout: str
    # What tells on the spot what was given there.
    show: str

    def one(self, number: int) -> str:
        """Write ``rank 3``; a node that was given no number has none yet."""
        return f"{self.noun} {number}" if number >= 0 else f"a {self.noun} without a number"

    def named(self, numbers: Iterable[int]) -> str:
        """Write ``rank 3`` or ``nodes 0-2 and 5``."""
        return self._own(ranks(numbers))

    def by_host(self, hosts: Mapping[int, str]) -> str:
        """Write numbers grouped by host: ``node 0 (host-a) and node 1 (host-b)``."""
        return self._own(by_host(hosts))

    def _own(self, words: str) -> str:
        # Those words hold numbers, host names in brackets and this noun. A host may be called "rank", but no host
        # name holds a blank.
        return words if self.noun == "rank" else words.replace("rank ", "node ").replace("ranks ", "nodes ")


RANKS = Party(
    noun="rank",
    size="world size",
    size_from="WORLD_SIZE or world_size=",
    number_from="RANK, rank=, --node-rank",
    address_from="MASTER_ADDR or init_method",
    port_from="MASTER_PORT, tcp://HOST:PORT",
    timeout="timeout=",
    show="`allhands whoami` there",
)

NODES = Party(
    noun="node",
    size="number of nodes",
    size_from="--nnodes",
    number_from="--node-rank",
    address_from="--coordinator (or --rdzv-endpoint, --master-addr)",
    port_from="the port in --coordinator",
    timeout="--timeout",
    show="its screen says what it waits for",
)
