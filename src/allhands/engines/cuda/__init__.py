"""CUDA tensors: memory of one shared GPU, and NCCL."""

from __future__ import annotations

__all__: list[str] = []
