"""Names: this machine's own, the coordinator's, and who answers for them."""

from __future__ import annotations

import socket

from ..control.bind import is_loopback
from ..diagnosis import duration, join
from ..environments.world import Address
from .concurrent import together
from .dns import Answer, ask, listed, resolver
from .finding import Finding, green, red, yellow
from .request import Case, Lookup, is_address

__all__ = ["check"]

_SECTION = "names"

# How long a name server may take before it counts as silent; a question is sent again meanwhile, so a lost packet does
# not make it so.
_SERVER_S = 1.5

# A name that the files know needs no server; one that answers is only compared with them.
_SHADOW_S = 0.6

# A job looks a name up many times over; from here on that is felt.
_SLOW_S = 1.0


def check(case: Case) -> list[Finding]:
    """Look at this machine's own name, and at the coordinator's where it is one."""
    found = [_own(case)]
    target = case.target
    if target is not None and target.host != "localhost" and not is_address(target.host):
        found += _target(case, target)
    return found


# This machine's own name --------------------------------------------------------------------------------------


def _own(case: Case) -> Finding:
    name = socket.gethostname()
    lookup = Lookup(Address(name, 0)).wait()
    if lookup.error is not None:
        return _unknown_own(case, name, lookup)
    addresses = [host for _, host in lookup.places]
    shown = f"{name} is {join(addresses)}"
    source = "/etc/hosts" if listed(case.hosts_file, name) else "the name service"
    strangers = [host for host in addresses if not is_loopback(host) and host not in case.local_addresses]
    if strangers and len(strangers) == len(addresses):
        return (red if case.several_hosts else yellow)(
            _SECTION,
            "own-name",
            "address-not-local",
            f"this machine's own name {name} leads to {join(strangers)}, which is not this machine",
            why=f"{source} says so; its interfaces have {join(sorted(_outer(case))) or 'no outer address'}",
            fix=f"correct the line of {name} in /etc/hosts, or its record in DNS; until then set GLOO_SOCKET_IFNAME to "
            "the interface that leads to the other machines",
            commands=(f"getent ahosts {name}", "ip -br addr"),
        )
    if case.several_hosts and all(is_loopback(host) for host in addresses):
        outer = sorted(_outer(case))
        return yellow(
            _SECTION,
            "own-name",
            "loopback-advertised",
            f"this machine's own name {name} leads to {join(addresses)}, where no other machine reaches it",
            why=f"{source} says so. allhands advertises the interface that leads to the coordinator and is not caught; "
            "torch's own Gloo advertises what its host name leads to, and so does a MASTER_ADDR of that name",
            fix=f"give {name} an outer address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
            commands=(f"sed -i 's/^{addresses[0]}\\(.*{name}\\)/{outer[0]}\\1/' /etc/hosts",) if outer else (),
        )
    return green(_SECTION, "own-name", shown, f"from {source}", addresses=addresses)


def _unknown_own(case: Case, name: str, lookup: Lookup) -> Finding:
    outer = sorted(_outer(case))
    line = f"{outer[0] if outer else '127.0.1.1'} {name}"
    silent = [each for each in _ask_servers(case, name) if not each.heard]
    if silent:
        return yellow(
            _SECTION,
            "own-name",
            "name-server-silent",
            f"this machine's own name {name} is in no file, and the name server does not answer",
            why=_silence(silent),
            fix=f"put `{line}` into /etc/hosts, or mend /etc/resolv.conf",
            commands=(f"echo '{line}' >> /etc/hosts",),
        )
    return yellow(
        _SECTION,
        "own-name",
        "address-unresolvable",
        f"this machine's own name {name} has no address",
        why=f"{lookup.error.strerror if lookup.error else ''}; torch's own Gloo looks its host name up when it starts",
        fix=f"put `{line}` into /etc/hosts",
        commands=(f"echo '{line}' >> /etc/hosts",),
    )


def _outer(case: Case) -> list[str]:
    # An IPv4 address is what every part of every stack takes; so those come first.
    found = [address for each in case.interfaces if each.up for address in each.outer]
    return sorted(found, key=lambda address: (":" in address, address))


# The coordinator's name ---------------------------------------------------------------------------------------


def _target(case: Case, target: Address) -> list[Finding]:
    if case.lookup is None:
        return []
    lookup = case.lookup.wait()
    files = listed(case.hosts_file, target.host)
    if lookup.error is not None:
        return [_unresolved(case, target, _ask_servers(case, target.host))]
    addresses = [host for _, host in lookup.places]
    found = []
    # What the files know is not asked for; but a record elsewhere that says otherwise is what other machines see.
    own = target.host == socket.gethostname()
    answers = [] if own else _ask_servers(case, target.host, _SHADOW_S if files else _SERVER_S)
    told = next((each for each in answers if each.addresses), None)
    if files and told is not None and not set(told.addresses) & set(addresses):
        found.append(
            yellow(
                _SECTION,
                "target-name",
                "name-shadowed",
                f"/etc/hosts says that {target.host} is {join(files)}, the name server says {join(told.addresses)}",
                why=f"this machine takes the first; machines without that line take the second ({told.server})",
                fix=f"take the line of {target.host} out of /etc/hosts, or make all machines agree",
                commands=(f"grep -n {target.host} /etc/hosts",),
            )
        )
    slow = lookup.seconds > _SLOW_S
    silent = [each for each in answers if not each.heard]
    if slow:
        found.append(
            yellow(
                _SECTION,
                "name-time",
                "name-server-silent",
                f"{target.host} took {duration(lookup.seconds)} to resolve",
                why=_silence(silent) or _speed(answers),
                fix="put the name into /etc/hosts, or "
                + (
                    "take the server that does not answer out of /etc/resolv.conf"
                    if silent
                    else "name a quicker server in /etc/resolv.conf"
                ),
                commands=(f"echo '{addresses[0]} {target.host}' >> /etc/hosts",),
            )
        )
    kinds = "IPv4 and IPv6" if len({family for family, _ in lookup.places}) > 1 else ""
    return found or [
        green(
            _SECTION,
            "target-name",
            f"{target.host} is {join(addresses)}" + (f" ({kinds})" if kinds else ""),
            f"from {'/etc/hosts' if files else 'the name service'} in {duration(lookup.seconds)}",
            addresses=addresses,
        )
    ]


def _unresolved(case: Case, target: Address, answers: list[Answer]) -> Finding:
    late = case.world is not None and case.world.late_names
    silent = [each for each in answers if not each.heard]
    troubled = [each for each in answers if each.heard and each.trouble and not each.exists]
    # One that answers well is enough: the system goes on to it, if later.
    if len(silent) + len(troubled) == len(answers):
        return red(
            _SECTION,
            "target-name",
            "name-server-silent",
            f"nobody says what {target.host} is: "
            + ("the name server does not answer" if silent else "the name server has trouble of its own"),
            why=_silence(silent) or join([f"{each.server} {each.trouble}" for each in troubled]),
            fix="name a server that answers in /etc/resolv.conf, open port 53 to it, or put the name into /etc/hosts",
            commands=("cat /etc/resolv.conf", f"getent ahosts {target.host}"),
        )
    if any(each.addresses for each in answers):
        # The server knows it and the system's own way of asking does not: /etc/nsswitch.conf, or the search list.
        return red(
            _SECTION,
            "target-name",
            "address-unresolvable",
            f"{target.host} has no address here, although {answers[0].server} knows it",
            why="the system's resolver does not ask that server for this name: see hosts: in /etc/nsswitch.conf",
            fix="put dns on the hosts: line of /etc/nsswitch.conf, or the name into /etc/hosts",
            commands=("grep ^hosts: /etc/nsswitch.conf",),
        )
    return (yellow if late else red)(
        _SECTION,
        "target-name",
        "address-unresolvable",
        f"there is no such name as {target.host}",
        why=(join([f"{each.server} says so after {duration(each.seconds)}" for each in answers]) or "no server to ask")
        + ("; names may come late here" if late else ""),
        fix="check MASTER_ADDR or HOST:PORT for a typing error; "
        f"`getent hosts {target.host}` must print an address on every machine",
        commands=(f"getent hosts {target.host}",),
    )


def _ask_servers(case: Case, name: str, seconds: float = _SERVER_S) -> list[Answer]:
    """Ask every name server at once."""
    known = resolver(case.resolver_file)
    return together(lambda server: ask(server, known.spellings(name), seconds), known.servers)


def _silence(silent: list[Answer]) -> str:
    quiet = f"said nothing for {duration(_SERVER_S)}"
    return join([f"{each.server} {f'does not answer: {each.trouble}' if each.trouble else quiet}" for each in silent])


def _speed(answers: list[Answer]) -> str:
    return join([f"{each.server} answered after {duration(each.seconds)}" for each in answers if each.heard])
