"""Measuring: what a roll call costs as jobs grow. Needs no torch."""

from .report import render
from .rollcall import run

__all__ = ["render", "run"]
