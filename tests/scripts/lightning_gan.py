"""The GAN of Lightning's examples: two optimizers with manual optimization, and noise drawn in `training_step`."""

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
parser.add_argument("--precision", default="32-true")
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1, torch.tensor(digits.target)


class GAN(LightningModule):
    def __init__(self, latent_dim=8):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1), nn.Sigmoid()
        )

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid, fake = torch.ones(imgs.size(0), 1).type_as(imgs), torch.zeros(imgs.size(0), 1).type_as(imgs)

        # train generator
        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("train/g_loss", g_loss, on_step=False, on_epoch=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        # train discriminator
        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("train/d_loss", d_loss, on_step=False, on_epoch=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [opt_g, opt_d]


seed_everything(0)
same = SameStep(global_batch=64, seed=0)
gan = GAN()
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
data = DataLoader(TensorDataset(images[:300], labels[:300]), batch_size=32, shuffle=True)
trainer.fit(gan, datamodule=same.dataloaders(train=data))
if trainer.is_global_zero:
    torch.save(gan.state_dict(), args.out / "weights.pt")
