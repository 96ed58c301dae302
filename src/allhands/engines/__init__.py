"""Engines move and reduce tensors; base.py is the interface. This package imports none of them: most need torch."""

__all__: list[str] = []
