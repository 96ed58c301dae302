"""What moves tensors. One file per engine; none of them knows who is in the group."""

from . import gloo, nccl
from .gloo import Wire
from .needs import needs

__all__ = ["Wire", "gloo", "nccl", "needs"]
