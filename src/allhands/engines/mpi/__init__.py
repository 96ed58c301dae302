"""MPI through mpi4py: which library, how a process gets into an MPI world, and the collectives on top."""

__all__: list[str] = []
