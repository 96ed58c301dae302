"""Starting ranks, and naming the rank to blame when they die: `allhands run` and `allhands.spawn`. No torch.

Imports nothing: every worker imports this package before its script.
"""

__all__: list[str] = []
