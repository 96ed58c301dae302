"""Training on several ranks: what wraps a model so that all ranks train the same one."""

from .ddp import DistributedDataParallel
from .gradients import GradientSync, average_gradients, sync_gradients

__all__ = ["DistributedDataParallel", "GradientSync", "average_gradients", "sync_gradients"]
