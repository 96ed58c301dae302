"""The control plane: roll call, key-value store, failure detection. Knows nothing of tensors or torch.

Imports nothing: a rank under a launcher needs no coordinator, and start-up time counts on every rank.
"""

__all__: list[str] = []
