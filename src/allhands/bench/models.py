"""The models that `allhands bench ddp` trains, and their batches."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["build"]


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the model ``name``, the same on every rank, and a batch for it."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        return nn.Sequential(*layers), torch.randn(64, 784)
    if name == "cnn":
        parts: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        head = [nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*parts, *head), torch.randn(16, 3, 32, 32)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    shape = (1, 16) if name == "transformer-16" else (8, 64)
    return nn.Sequential(nn.Embedding(1000, 256), encoder, nn.Linear(256, 1000)), torch.randint(0, 1000, shape)
