import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Balanced(Sampler):
    """Every epoch has as many samples of both classes; ranks take turns."""

    def __init__(self, labels, rank, world):
        self.labels, self.rank, self.world, self.epoch = labels, rank, world, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.epoch)
        sides = [torch.where(self.labels == c)[0] for c in (0, 1)]
        sides = [side[torch.randperm(len(side), generator=g)] for side in sides]
        order = torch.stack([side[: len(self) * self.world // 2] for side in sides], dim=1).flatten()
        return iter(order[self.rank :: self.world].tolist())

    def __len__(self):
        return 96 // self.world


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(160, 5, generator=g)
        y = (x[:, 0] > 0.2).long()
        self.train, self.val = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
        self.sampler = Balanced(y[:128], self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self):
        return DataLoader(self.train, 8, sampler=self.sampler)

    def val_dataloader(self):
        return DataLoader(self.val, 8, sampler=range(self.trainer.global_rank, 32, self.trainer.world_size))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))

    def on_train_epoch_start(self):
        self.trainer.datamodule.sampler.epoch = self.current_epoch

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=2,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
        logger=CSVLogger("logs", name="run"), callbacks=[ModelCheckpoint("models", monitor="val/loss", save_top_k=1, save_last=True)],
    )
    trainer.fit(Net(), datamodule=Data())
