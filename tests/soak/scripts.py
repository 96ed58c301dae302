"""The scripts that faults are made of, and the signals that hit them."""

from __future__ import annotations

import time
from collections.abc import Callable
from signal import Signals

from ranks.harness import Job
from soak.laboratory import INTO_S, Site

__all__ = ["CALL", "FORM", "FORMED", "HIT", "SPIN", "calls", "dies", "forms", "send"]

FORM = "say(outcome=attempt(form))\nend()\n"
FORMED = "init()\ngate('formed')\n"

# The rest of a script whose fault is in its collectives. A remaining error is reported once; if there is none, or the
# fix has made it so, the group is used.
CALL = """
found = attempt(call) if faulty else {"kind": ""}
if faulty:
    say(outcome={**found, "x": x.tolist()})
if not faulty or (ours and not found["kind"]):
    use()
end()
"""

# Rank 1, or another, waits where it can be hit, the others in a collective.
HIT = (
    FORMED
    + """
say(ready=True)
if faulty and rank == int(os.environ.get("VICTIM", "1")):
    time.sleep(60)
def call():
    dist.all_reduce(x)
"""
    + CALL
)

# Every rank makes collectives until one raises.
SPIN = FORMED + "say(ready=True)\ndef call():\n    while True:\n        dist.all_reduce(x)\n" + CALL


def forms(**kw: str) -> str:
    """Return a script that forms a group with these arguments where it is faulty."""
    given = ", ".join(f"{name}={value}" for name, value in kw.items())
    return f"say(outcome=attempt(form, **(dict({given}) if faulty else {{}})))\nend()\n"


def calls(usual: str, odd: str, *, before: str = "") -> str:
    """Return a script whose rank 1 makes a different call."""
    lines = f"def call():\n    if rank == 1:\n        {odd}\n    else:\n        {usual}\n"
    return FORMED + before + lines + CALL


def dies(how: str) -> str:
    """Return a script whose rank 1 reports the start of the fault and then does ``how``, while the others wait."""
    return calls("dist.all_reduce(x)", f"time.sleep(0.3); say(fault=True); {how}")


def send(number: Signals, rank: int, key: str = "ready") -> Callable[[Job, Site], float]:
    """Return a function that sends a signal to a rank, shortly after all have reported ``key``."""

    def during(job: Job, _: Site) -> float:
        job.wait_for(key)
        time.sleep(INTO_S)
        return job.signal(rank, number)

    return during
