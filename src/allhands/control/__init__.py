"""The control plane: who is in the job, who fell, and the key-value store. Knows nothing of tensors or torch."""

from .coordinator import Coordinator
from .meeting import Board, FileBoard, Notice
from .member import Member
from .messages import Claim
from .roll import Seat, answer

__all__ = ["Board", "Claim", "Coordinator", "FileBoard", "Member", "Notice", "Seat", "answer"]
