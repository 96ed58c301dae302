"""Starting ranks and saying who is to blame when they die: `allhands run` and `allhands.spawn`. Never imports torch.

Imports nothing at all: every worker comes by here before its script.
"""

__all__: list[str] = []
