"""`allhands bench`: measurements of the roll call, launches, collectives and training."""

__all__: list[str] = []
