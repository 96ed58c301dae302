"""What this machine's own firewall says, where this user may read it."""

from __future__ import annotations

import os
import shutil
import subprocess

from ..diagnosis import join
from .finding import Finding, green, yellow
from .request import Case

__all__ = ["check", "rules"]

# Either tool answers in milliseconds; one that does not is left alone.
_TOOL_S = 1.0

_VERDICTS = ("drop", "reject")


def rules() -> list[str] | None:
    """Return the rules by which this machine drops or rejects what comes in; None where they cannot be read."""
    if os.geteuid() != 0:
        return None
    read = False
    found: list[str] = []
    for command, parse in ((["nft", "list", "ruleset"], _nft), (["iptables-save"], _iptables)):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            read = True
            found += parse(done.stdout)
    return found if read else None


def _nft(text: str) -> list[str]:
    found: list[str] = []
    inward, chain, policy = False, "", ""
    for line in (each.strip() for each in text.splitlines()):
        if line.startswith("chain "):
            chain, inward = line.split()[1], False
        elif "hook " in line:
            inward = "hook input" in line or "hook prerouting" in line
            policy = "policy drop" if inward and "policy drop" in line else ""
            if policy:
                found.append(f"chain {chain}: policy drop")
        elif inward and any(verdict in line.split() for verdict in _VERDICTS):
            found.append(f"chain {chain}: {line}")
    return found


def _iptables(text: str) -> list[str]:
    return [
        line.strip()
        for line in text.splitlines()
        if line.startswith(":INPUT DROP") or (line.startswith("-A INPUT") and line.split()[-1] in {"DROP", "REJECT"})
    ]


def check(case: Case) -> list[Finding]:
    """Say what comes in only in part. A concern only where other machines are to come in."""
    found = rules()
    if found is None:
        return []
    if not found:
        return [green("network", "firewall", "no firewall of its own")]
    shown = join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    if not case.several_hosts:
        return [green("network", "firewall", f"a firewall with {len(found)} rules that keep packets out", shown)]
    return [
        yellow(
            "network",
            "firewall",
            "ports-filtered",
            "this machine's own firewall keeps some packets out",
            why=f"{shown} (observed); Gloo and NCCL listen on ports that the kernel chooses",
            fix="let the other machines of the job in on all ports above 1023; `allhands doctor --listen` here and "
            "`allhands doctor HOST:PORT` there shows whether they come in",
            commands=("nft list ruleset",),
            certain=False,
        )
    ]
