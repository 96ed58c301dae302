"""`allhands doctor`: checks of a machine, of the way between two machines, and of a stalled job. Needs no torch."""

from .finding import Finding, Level, exit_code
from .request import Request, make_request
from .run_checks import run_checks

__all__ = ["Finding", "Level", "Request", "exit_code", "make_request", "run_checks"]
