"""Shared memory inside each host, TCP between hosts."""

__all__: list[str] = []
