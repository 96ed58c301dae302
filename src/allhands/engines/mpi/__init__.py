"""MPI through mpi4py: finding the library, joining its world, and the engine on its collectives."""

__all__: list[str] = []
