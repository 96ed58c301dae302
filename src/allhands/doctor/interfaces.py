"""The network interfaces of this machine, and which of them leads where."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

from ..control.bind import is_loopback

__all__ = ["Interface", "chosen", "interfaces", "leads_to"]

# Any port does: connecting a datagram socket only asks the kernel for its route, and sends nothing.
_ANY_PORT = 9

# <linux/sockios.h>, which the standard library does not name; and from <linux/if.h> "up" and "running": a cable is in.
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_UP = 0x1 | 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface: its addresses without their scope, and whether it is up."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    up: bool

    @property
    def loopback(self) -> bool:
        """Whether it leads nowhere but to this machine."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    @property
    def outer(self) -> tuple[str, ...]:
        """Its addresses that other machines can use: neither loopback nor link-local."""
        return tuple(
            each for each in self.addresses if not is_loopback(each) and not each.startswith(("fe80:", "169.254."))
        )


def interfaces() -> list[Interface]:
    """Return every interface."""
    import psutil  # here: it takes a tenth of the whole command's start

    addresses = psutil.net_if_addrs()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            inet = tuple(
                str(entry.address).partition("%")[0]
                for entry in addresses.get(name, [])
                if entry.family in {socket.AF_INET, socket.AF_INET6}
            )
            flags = _ask(asking, name, _SIOCGIFFLAGS, "H")
            found.append(Interface(name, inet, _ask(asking, name, _SIOCGIFMTU, "i"), flags & _UP == _UP))
    return found


def _ask(asking: socket.socket, name: str, question: int, kind: str) -> int:
    """Ask the kernel for a number about an interface; 0 where it has just gone."""
    try:
        answer = fcntl.ioctl(asking, question, struct.pack("40s", name.encode()))
    except OSError:
        return 0
    # A struct ifreq: 16 bytes of name, then what was asked for.
    return int(struct.unpack_from(kind, answer, 16)[0])


def leads_to(places: list[tuple[int, str]], present: list[Interface]) -> tuple[str, Interface | None]:
    """Return the own address and the interface by which the kernel would send to the first place it has a way to."""
    for family, host in places:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect((host, _ANY_PORT))
            except OSError:
                continue
            own = str(asking.getsockname()[0]).partition("%")[0]
        return own, next((each for each in present if own in each.addresses), None)
    return "", None


def chosen(value: str, present: list[Interface], *, prefixes: bool) -> tuple[list[Interface], list[str]]:
    """Return the interfaces that a variable such as GLOO_SOCKET_IFNAME chooses, and the words that choose none.

    NCCL (``prefixes``) takes beginnings of names, ``=NAME`` for exactly that one, and ``^`` for "all but these".
    """
    exclude = prefixes and value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^").lstrip("=").split(",") if word]

    def meant(word: str, name: str) -> bool:
        return name.startswith(word) if prefixes and not exact else name == word

    if exclude:
        return [each for each in present if not any(meant(word, each.name) for word in words)], []
    found = [each for each in present if any(meant(word, each.name) for word in words)]
    return found, [word for word in words if not any(meant(word, each.name) for each in present)]
