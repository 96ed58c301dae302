"""The catalogue of diagnoses and how each is put into words. No I/O beyond reading its own pages."""

from .catalogue import CATALOGUE, Entry, closest, page, title
from .diagnosis import MOST_NAMED, Diagnosis, by_host, count, duration, join, ranks

__all__ = [
    "CATALOGUE",
    "MOST_NAMED",
    "Diagnosis",
    "Entry",
    "by_host",
    "closest",
    "count",
    "duration",
    "join",
    "page",
    "ranks",
    "title",
]
