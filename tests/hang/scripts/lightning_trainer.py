"""The same training in a Lightning Trainer, without samestep."""

import os
import sys
from datetime import timedelta

import torch
from faults import BATCH, DEVICE, TIMEOUT, Rows, disturb, meet, num_workers, rank, share_gpu
from torch.utils.data import DataLoader

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:  # it is published under two names
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy

fault = sys.argv[1]


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        disturb(fault, batch_idx)
        if fault == "rank_0":
            self.trainer.strategy.barrier()  # waits: rank_0
        return self.layer(rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


share_gpu()
meet()
on_cpu = DEVICE == "cpu"
on_node = int(os.environ["LOCAL_WORLD_SIZE"]) if on_cpu else 1  # Lightning does not let two ranks of a node share a GPU
trainer = Trainer(
    accelerator="cpu" if on_cpu else "gpu",
    devices=on_node,
    num_nodes=2 // on_node,
    strategy=DDPStrategy(process_group_backend="gloo" if on_cpu else "nccl", timeout=timedelta(seconds=TIMEOUT)),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(Rows(fault), BATCH, num_workers=num_workers(fault)))  # waits
print(f"rank {rank()} is done")
