"""Every fault of the laboratory: under torch alone, under allhands, and with its fix. What is measured becomes a table.

`make faults` runs this and writes docs/faults.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making
from soak import claim_faults, doctor_faults, group_faults, network_faults, rendezvous_faults, route_faults
from soak.laboratory import AT_ONCE_S, Fault, Site, mended, record, told, words

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

# One deadline, honoured: exceeded by no more than this where the cause shows only by waiting.
GRACE_S = 2.0

FAULTS = [
    *claim_faults.FAULTS,
    *rendezvous_faults.FAULTS,
    *group_faults.FAULTS,
    *doctor_faults.FAULTS,
    *route_faults.FAULTS,
    *network_faults.FAULTS,
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "-") for fault in FAULTS])
def test_the_fault_is_named_and_its_fix_works(fault: Fault, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Slug and ranks are right on every rank concerned, in time; with the fix of the message the group forms."""
    site = Site(tmp_path)
    if fault.layout:
        network: Making = request.getfixturevalue("network")
        site.hosts = network(max(fault.layout) + 1).hosts
        for host in site.hosts:
            # Not Debian's 127.0.1.1: that is a fault of its own.
            others = "".join(f"{other.ipv4} {other.name}\n" for other in site.hosts)
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{others}")
    ours = found_by_look(fault, site) if fault.look is not None else found_by_ranks(fault, site)
    if fault.beside is not None:
        says, after = fault.beside(site.moved())
    else:
        found = told(fault, site.moved(), "torch")
        last = max(found.values(), key=lambda each: (not each["spoke"], each["after"]))
        says, after = words(found), last["after"]
    alone = {"says": f"{says} ({fault.note})" if fault.note else says, "after": round(after, 2)}
    record(fault, site, alone, ours)


def found_by_look(fault: Fault, site: Site) -> dict[str, Any]:
    """Let the doctor or the launcher find it, apply the fix, and fail unless the report is right."""
    assert fault.look is not None
    found = fault.look(site.moved())
    assert (found.slug, found.ranks) == (fault.slug, fault.ranks), found
    assert found.seconds < AT_ONCE_S or not fault.certain, found
    return {
        "slug": found.slug,
        "says": found.what,
        "after": round(found.seconds, 2),
        "by": found.by,
        "fix": found.fix,
    }


def found_by_ranks(fault: Fault, site: Site) -> dict[str, Any]:
    """Run ranks of allhands, fail unless their diagnosis is right, and apply its fix."""
    outcomes = told(fault, site.moved(), "allhands")
    for number, outcome in outcomes.items():
        slug, ranks = fault.special.get(number, (fault.slug, fault.ranks))
        assert (outcome.get("slug"), outcome.get("ranks")) == (slug, list(ranks)), outcome
        if slug == fault.slug:
            assert fault.says in outcome["text"], outcome
            assert fault.hosts in {(), tuple(outcome["hosts"])}, outcome
        at_once = fault.certain and slug == fault.slug
        assert outcome["after"] < (AT_ONCE_S if at_once else fault.timeout_s + GRACE_S), outcome
    told_so = [each for each in outcomes.values() if each["slug"] == fault.slug]
    slowest = max(told_so, key=lambda each: float(each["after"]))
    assert fault.fix is not None
    for fix in dict.fromkeys(each["fix"] for each in told_so):
        mended(fault, fault.fix, site.moved(), fix)
    return {
        "slug": fault.slug,
        "says": slowest["text"].splitlines()[0],
        "after": round(slowest["after"], 2),
        "by": "",
        "fix": slowest["fix"],
    }
