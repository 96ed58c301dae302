"""Every command of docs/stalls.md, typed on two machines, ends well where nothing is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hosts.conftest import Making, ip
from hosts.machine import Machine, finish, typed

pytestmark = pytest.mark.hosts

GUIDE = Path(__file__).parents[2] / "docs" / "stalls.md"
LISTEN = "allhands doctor --listen"


def commands() -> list[str]:
    """Return the lines of the shell blocks, without their comments, each once."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def test_the_guide_has_its_six_families() -> None:
    """Each family says what one sees, what it is and what to type, and every diagnosis that it names exists."""
    from allhands.diagnosis import CATALOGUE

    text = GUIDE.read_text(encoding="utf-8")
    families = re.split(r"^## \d\. ", text, flags=re.MULTILINE)[1:]
    assert [family.splitlines()[0] for family in families] == [
        "Network configuration",
        "Names",
        "Firewall",
        "Backend and device",
        "Resources",
        "Timing",
    ]
    for family in families:
        assert all(f"**{words}.**" in family for words in ("What you see", "What it is", "What to type"))
        named = re.search(r"Diagnoses?:\s([^.]+)\.", family)
        assert named is not None
        assert {name.strip() for name in named[1].split(",")} <= set(CATALOGUE)


def test_every_command_works(cables: Making, tmp_path: Path) -> None:
    """With a doctor that listens on node-a, every other command on node-b exits with 0.

    But for that of a firewall that is not installed here.
    """
    a, b = cables().hosts
    for host in (a, b):
        host.hosts_file.write_text(f"127.0.0.1 localhost\n{a.ipv4} node-a\n{b.ipv4} node-b\n")
        ip(f"-n {host.namespace} route add default dev eth0")
    found = commands()
    assert LISTEN in found
    assert len(found) >= 15
    # The system's name server is on a network that these machines have not: one that refuses at once is theirs.
    resolver = tmp_path / "resolv"
    resolver.write_text("nameserver 127.0.0.1\n")
    here = Machine(b, "node-b", tmp_path, resolver=resolver)
    listener = Machine(a, "node-a", tmp_path).type(f"exec {LISTEN}")
    # With processes of their own: jobs that other tests have here, also stuck ones, are not those of node-b.
    script = tmp_path / "commands"
    typing = [line for line in found if line != LISTEN and (line.split()[0] != "nft" or shutil.which("nft"))]
    script.write_text("\n".join(f"{line} || {{ echo 'failed: {line}'; exit 1; }}" for line in typing))
    alone = f"exec unshare --pid --fork --kill-child --mount-proc sh {script}"
    with typed(listener):
        listener.wait_for("listening on")
        (said,) = finish([here.type(alone)])
        listener.wait_for("found:")
    assert "ports open both ways" in said
    assert "X " not in [line[15:17] for line in said.splitlines()]
