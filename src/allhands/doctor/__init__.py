"""Why does it stall, as a command: `allhands doctor`. A machine, the way between two, or a stuck job. No torch."""

from .finding import Finding, Level, exit_code
from .request import Case, open_case
from .run_checks import examine

__all__ = ["Case", "Finding", "Level", "examine", "exit_code", "open_case"]
