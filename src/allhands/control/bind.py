"""Where a coordinator may listen: the address that was asked for, if others can reach it there."""

from __future__ import annotations

import ipaddress
import socket
import time

from ..environments.world import Address
from ..errors import fail
from . import connect
from .wording import RANKS, Party

__all__ = ["OPEN", "bind_address", "is_loopback"]

# A name that does not resolve is asked for again for this long, in case the answer was a hiccup.
_AGAIN_S = 1.2

# Said once where strangers can come in; takes the host and what those are called who should have a token.
OPEN = (
    "the coordinator listens on %s without a token: anyone who reaches that port can join or disturb this job. "
    "Set the same ALLHANDS_TOKEN on every %s to close it."
)


def bind_address(
    address: Address,
    deadline: float,
    *,
    who: str,
    bind: str = "",
    late_names: bool = False,
    share: tuple[int, int] | None = None,
    party: Party = RANKS,
    notify: connect.Notify | None = None,
) -> str:
    """Return the IP address to bind for ``address``, which is ``bind`` where that was given; raise why there is none.

    ``share`` is how many of how many are on this machine: with others elsewhere, a name that leads to this machine's
    loopback is an error.
    """
    if bind:
        return bind
    attempts = connect.Attempts(address, party)
    while True:
        try:
            places = connect.resolve(address.host, address.port, deadline)
            break
        except socket.gaierror as problem:
            attempts.tries += 1
            attempts.name_error = problem
            waited = time.monotonic() - attempts.started
            patience = deadline - attempts.started if late_names else _AGAIN_S
            if waited >= patience:
                raise connect.diagnose(attempts, who=who, several_hosts=False) from problem
            if notify is not None:
                notify(f"waiting for the name of the coordinator at {address}: {attempts.summary()}")
            time.sleep(0.1)
    # A name with both kinds of address: peers try all of them, so the older kind serves everyone.
    host = min(places)[1]
    spelled = address.host in {"localhost", host}
    if is_loopback(host) and not spelled and share is not None and share[0] < share[1]:
        raise fail(
            "loopback-advertised",
            f"{address.host} resolves to {host} on {party.noun} 0's own machine, where no other machine can reach it",
            who=who,
            why=f"only {share[0]} of {share[1]} {party.noun}s {'is' if share[0] == 1 else 'are'} on this machine",
            fix=f"in /etc/hosts of this machine write its outer address (`ip -br addr`) in the place of {host} for "
            f"{address.host}, or set ALLHANDS_BIND to that address",
            ranks=(0,),
        )
    return host


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` is an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
