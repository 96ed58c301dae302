"""The nouns and option names of roll call messages: for ranks, and for the nodes of `allhands run`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ..diagnosis import by_host, ranks

__all__ = ["NODES", "RANKS", "Wording"]


class Wording(msgspec.Struct, frozen=True):
    """The noun for the participants, and where their size, number, address, port and timeout are set."""

    noun: str
    size: str
    size_from: str
    number_from: str
    address_from: str
    port_from: str
    timeout: str
    # The command or place that shows these values on the participant's host.
    show: str

    def one(self, number: int) -> str:
        """Return ``rank 3``. A node may have no number yet (-1)."""
        return f"{self.noun} {number}" if number >= 0 else f"a {self.noun} without a number"

    def named(self, numbers: Iterable[int]) -> str:
        """Return ``rank 3`` or ``nodes 0-2 and 5``."""
        return ranks(numbers, self.noun)

    def by_host(self, hosts: Mapping[int, str]) -> str:
        """Return the numbers grouped by host: ``node 0 (host-a) and node 1 (host-b)``."""
        return by_host(hosts, self.noun)


RANKS = Wording(
    noun="rank",
    size="world size",
    size_from="WORLD_SIZE or world_size=",
    number_from="RANK, rank=, --node-rank",
    address_from="MASTER_ADDR or init_method",
    port_from="MASTER_PORT, tcp://HOST:PORT",
    timeout="timeout=",
    show="`allhands whoami` there",
)

NODES = Wording(
    noun="node",
    size="number of nodes",
    size_from="--nnodes",
    number_from="--node-rank",
    address_from="--coordinator (or --rdzv-endpoint, --master-addr)",
    port_from="the port in --coordinator",
    timeout="--timeout",
    show="the terminal of its agent shows the address it uses",
)
