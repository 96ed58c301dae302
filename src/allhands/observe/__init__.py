"""Observation of ranks from inside and outside: the flight recorder and the stacks of a rank's threads."""

from __future__ import annotations

from .flight_recorder import Entry, FlightRecorder, read

__all__ = ["Entry", "FlightRecorder", "read"]
