"""All checks of this machine and of the way to the coordinator, at the same time, each with its own deadline."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import AllhandsError
from . import cores, environment, firewall, hostnames, jobs, leftovers, ports, resources, routes, stack_check
from .concurrent import together
from .finding import SECTIONS, Finding, of, yellow
from .peer_client import visit
from .peer_protocol import Conversation
from .request import Case

__all__ = ["examine"]

_Check = Callable[[Case], list[Finding]]


def examine(case: Case) -> list[Finding]:
    """Return what was found, in the order of the sections."""
    checks: dict[str, _Check] = {
        "names": hostnames.check,
        "routes": routes.check,
        "ports": _ports,
        "firewall": firewall.check,
        "resources": resources.check,
        "cores": cores.check,
        "leftovers": leftovers.check,
        "stack": stack_check.check,
        "surroundings": environment.check,
        "jobs": lambda _: jobs.at_work(),
    }
    # What several checks look at is found out once, before there are several threads.
    _ = case.interfaces, case.lookup, case.nodes
    found = together(lambda name: _guarded(name, checks[name], case), list(checks))
    return sorted(_weighed([each for part in found for each in part]), key=lambda each: SECTIONS.index(each.section))


def _weighed(found: list[Finding]) -> list[Finding]:
    """Leave out the suspicion that rules of this machine keep others out, where it was tried: that is then known."""
    tried = any(each.check in {"ports", "ports-there", "ports-back"} for each in found)
    return [each for each in found if not (tried and each.check == "firewall" and each.level == "yellow")]


def _guarded(name: str, check: _Check, case: Case) -> list[Finding]:
    """Run one check; one that fails itself must not take the others with it."""
    try:
        return check(case)
    except AllhandsError as problem:
        # Bad settings, such as a token file that others can read.
        return [of("environment", f"settings-{name}", "red", problem.diagnosis)]
    except Exception as problem:  # noqa: BLE001  # a doctor that falls over its own feet helps nobody
        return [
            yellow(
                "environment",
                f"doctor-{name}",
                "",
                f"the doctor could not look at {name}: {type(problem).__name__}: {problem}",
                fix="this is a fault of allhands, not of the machine: please report it",
            )
        ]


def _ports(case: Case) -> list[Finding]:
    found, service = ports.check(case)
    if service is not None and service.link is not None and service.splitter is not None:
        with service.link:
            found += visit(Conversation(service.link, service.splitter, service.rest or []))
    return found
