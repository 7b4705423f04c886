import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(96, 5, generator=g)
        self.train = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)
        self.history = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.history.append(loss.item())
        return loss

    def on_train_end(self):
        folder = Path(self.trainer.default_root_dir)
        summary = {"steps": len(self.history), "last": self.history[-1]}
        (folder / "history.json").write_text(json.dumps(summary))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def cli():
    pl.seed_everything(11)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
    trainer.fit(Model(), datamodule=Data())


if __name__ == "__main__":
    cli()
