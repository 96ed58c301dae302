"""Every fault of the laboratory, once under torch alone and once under allhands; what is measured becomes a table.

`make faults` runs this and writes docs/faults.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making
from soak.laboratory import AT_ONCE_S, Fault, Site, fixed, record, told, words
from soak.one_machine import FAULTS as HERE
from soak.two_machines import FAULTS as BETWEEN

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("nursery")]

# One deadline, honoured: exceeded by no more than this where the cause shows only by waiting.
GRACE_S = 2.0

FAULTS = [*HERE, *BETWEEN]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "-") for fault in FAULTS])
def test_the_fault_is_named(fault: Fault, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The slug and the rank are right on every rank that is to be told, in time; with the fix the group forms."""
    site = Site(tmp_path)
    if fault.layout:
        network: Making = request.getfixturevalue("network")
        site.hosts = network(max(fault.layout) + 1).hosts
        for host in site.hosts:
            # Not Debian's 127.0.1.1: that is a fault of its own.
            others = "".join(f"{other.ipv4} {other.name}\n" for other in site.hosts)
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{others}")
    ours = asked(fault, site)
    alone: dict[str, Any] = {"says": fault.alone, "after": None}
    if not fault.alone:
        found = told(fault, site.moved(), "torch")
        last = max(found.values(), key=lambda each: (not each["spoke"], each["after"]))
        alone = {"says": words(found), "after": round(last["after"], 2)}
    if fault.fix and fault.look is None:
        fixed(fault, site.moved())
    record(fault, site, alone, ours, fix_works=bool(fault.fix))


def asked(fault: Fault, site: Site) -> dict[str, Any]:
    """Ask allhands, and fail unless it says what it should."""
    if fault.look is not None:
        found = fault.look(site.moved())
        assert found.slug == fault.slug, found
        assert found.seconds < AT_ONCE_S or not fault.certain, found
        return {"slug": found.slug, "says": found.what, "after": round(found.seconds, 2), "doctor": True}
    outcomes = told(fault, site.moved(), "allhands")
    for number, outcome in outcomes.items():
        slug, ranks = fault.special.get(number, (fault.slug, fault.ranks))
        if fault.either and outcome.get("ranks"):
            ranks = tuple(sorted(set(ranks) & set(outcome["ranks"])))
        assert (outcome.get("slug"), outcome.get("ranks")) == (slug, list(ranks)), outcome
        assert fault.host in f"{outcome['hosts']} {outcome['text']}", outcome
        at_once = fault.certain and slug == fault.slug
        assert outcome["after"] < (AT_ONCE_S if at_once else fault.timeout_s + GRACE_S), outcome
    told_so = [each for each in outcomes.values() if each["slug"] == fault.slug]
    slowest = max(told_so, key=lambda each: float(each["after"]))
    return {"slug": fault.slug, "says": slowest["text"].splitlines()[0], "after": round(slowest["after"], 2)}
