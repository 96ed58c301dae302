"""All checks of this machine and of the way to the coordinator, run concurrently; each has its own time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import AllhandsError
from . import engines, environment, hostnames, jobs, ports, resources, routes
from .concurrent import run_concurrently
from .finding import SECTIONS, Finding, Section
from .proc_status import check_leftovers
from .request import Request

__all__ = ["run_checks"]

_ENVIRONMENT = Section("environment")

_Check = Callable[[Request], Iterable[Finding]]


def run_checks(request: Request) -> list[Finding]:
    """Run every check; return the findings in the order of the sections."""
    checks: dict[str, _Check] = {
        "names": hostnames.check,
        "routes": routes.check,
        "ports": ports.check,
        "firewall": routes.check_firewall,
        "resources": resources.check,
        "cores": resources.check_cores,
        "leftovers": check_leftovers,
        "stack": engines.check,
        "environment": environment.check,
        "jobs": lambda _: jobs.list_jobs(),
    }
    results = run_concurrently(lambda name: _guarded(name, checks[name], request), list(checks))
    found = _without_disproved([each for result in results for each in result])
    return sorted(found, key=lambda each: SECTIONS.index(each.section))


def _without_disproved(found: list[Finding]) -> list[Finding]:
    """Remove the warning about this machine's firewall if connections through it were tried."""
    tried = any(each.check in {"ports", "ports-there", "ports-back"} for each in found)
    return [each for each in found if not (tried and each.check == "firewall" and each.level == "yellow")]


def _guarded(name: str, check: _Check, request: Request) -> list[Finding]:
    """Run one check; if it fails, the others still run."""
    try:
        return list(check(request))
    except AllhandsError as problem:
        # Invalid settings, such as a token file that others can read.
        return [_ENVIRONMENT.of(f"settings-{name}", "red", problem.diagnosis)]
    except Exception as problem:  # noqa: BLE001  # an unknown fault of a check is reported as a finding
        return [
            _ENVIRONMENT.yellow(
                f"doctor-{name}",
                "",
                f"the doctor's check of {name} failed: {type(problem).__name__}: {problem}",
                fix="this is a fault of allhands, not of the machine: please report it",
            )
        ]
