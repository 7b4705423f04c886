"""The autoencoder of Lightning's introduction, as a denoising one: the noise is drawn in `training_step`."""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep.lightning import FileLogger, SameStep, launcher_args

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--precision", default="32-true")
args = parser.parse_args()

images = torch.tensor(load_digits().images, dtype=torch.float32) / 16


class LitAutoEncoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 64))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x + 0.2 * torch.randn_like(x))
        loss = F.mse_loss(self.decoder(z), x)
        self.log("train/reconstruction", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        x = x.view(x.size(0), -1)
        self.log("val/loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


train = DataLoader(TensorDataset(images[:300]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(images[300:400]), batch_size=32)

seed_everything(0)
same = SameStep(global_batch=64, seed=0, micro_batch=args.micro_batch)
autoencoder = LitAutoEncoder()
trainer = Trainer(
    max_epochs=args.epochs,
    callbacks=[same, FileLogger(args.out)],
    precision=args.precision,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **launcher_args(),
)
trainer.fit(autoencoder, datamodule=same.dataloaders(train=train, val=test))
if trainer.is_global_zero:
    torch.save(autoencoder.state_dict(), args.out / "weights.pt")
