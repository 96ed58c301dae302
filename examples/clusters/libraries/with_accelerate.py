"""Train a small model with Accelerate, in the group that `allhands run --init` has formed."""

import torch
import torch.distributed
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.rand(256, 2)
data = DataLoader(TensorDataset(points, points @ torch.tensor([[1.0], [-2.0]])), batch_size=16)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(5):
    for share, wanted in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(share), wanted))
        optimizer.step()

size, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
weight = accelerator.unwrap_model(model).weight.data
print(f"rank {accelerator.process_index} trained with Accelerate: {size} ranks, backend {backend}, {weight}")
accelerator.end_training()
