import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Events(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, self.n, stride):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(6, generator=g)
            yield x, x.max().unsqueeze(0)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Events(160), batch_size=8, num_workers=1)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=Data())
