"""The version of allhands, in a module of its own so that it can be read without importing anything else."""

__all__ = ["__version__"]

__version__ = "0.1.0"
