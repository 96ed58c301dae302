"""CUDA tensors: memory of one shared GPU, and NCCL."""

__all__: list[str] = []
