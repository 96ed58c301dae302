"""What moves tensors. One file per engine; none of them knows who is in the group.

Imports none of them: most need torch, and what asks after an MPI (`mpi.library`) is used without it too.
"""

__all__: list[str] = []
