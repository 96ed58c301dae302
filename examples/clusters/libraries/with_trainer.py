"""Train a small language model with Transformers' Trainer, in the group that `allhands run --init` has formed."""

import tempfile

import torch
import torch.distributed
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset):
    """Sequences of consecutive numbers, modulo 32."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = (torch.arange(16) + index) % 32
        return {"input_ids": sequence, "labels": sequence}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    trained = Trainer(model=model, args=arguments, train_dataset=Counting()).train()
    size, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
    print(
        f"rank {arguments.process_index} trained with Trainer: {size} ranks, backend {backend}, "
        f"{trained.global_step} steps, loss {trained.training_loss:.3f}"
    )
