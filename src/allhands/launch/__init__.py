"""Starting a job on this node and saying who is to blame when it dies: `allhands run`. Never imports torch."""

from .job import Job

__all__ = ["Job"]
