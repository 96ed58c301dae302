"""Fit a small model with PyTorch Lightning on the backend `allhands`."""

import lightning
import torch
import torch.distributed
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of one batch."""
        points, wanted = batch
        return nn.functional.mse_loss(self.layer(points), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        """Print the result while the group exists."""
        size, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
        print(
            f"rank {self.global_rank} trained with Lightning: {size} ranks, backend {backend}, {self.layer.weight.data}"
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    points = torch.rand(256, 2)
    data = DataLoader(TensorDataset(points, points @ torch.tensor([[1.0], [-2.0]])), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="allhands"),
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), data)
