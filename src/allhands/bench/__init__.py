"""`allhands bench`: measurements of the roll call, launches, collectives and training. Importing it needs no torch."""

from .rollcall import run
from .tables import rollcall_table

__all__ = ["rollcall_table", "run"]
