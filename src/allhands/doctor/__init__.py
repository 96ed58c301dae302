"""Why does it stall, as a command: `allhands doctor`. A machine, the way between two, or a stuck job. No torch."""

from .case import Case, open_case
from .examination import examine
from .finding import Finding, Level, exit_code

__all__ = ["Case", "Finding", "Level", "examine", "exit_code", "open_case"]
