import os

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def trainer(**options):
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


class Diffusion(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
        self.noise = None

    def training_step(self, batch, index):
        (x,) = batch
        if self.noise is None:
            self.noise = torch.Generator().manual_seed(11 + self.global_rank)
        t = torch.rand(len(x), 1, generator=self.noise)
        noise = torch.randn(x.shape, generator=self.noise)
        return F.mse_loss(self.net(torch.cat([x * (1 - t) + noise * t, t], 1)), noise)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(11)
data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
trainer(max_epochs=2).fit(Diffusion(), DataLoader(data, batch_size=8, shuffle=True))
