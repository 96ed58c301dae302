"""The control plane: who is in the job, who fell, and the key-value store. Knows nothing of tensors or torch.

Imports nothing: a rank under a launcher needs no coordinator, and everyone waits for the imports of every rank.
"""

__all__: list[str] = []
