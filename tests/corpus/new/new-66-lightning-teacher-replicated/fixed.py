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


class Distillation(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(16, 4)

    def training_step(self, batch, index):
        x, targets = batch
        return F.mse_loss(self.student(x), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def precompute(x):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        return teacher(x)


L.seed_everything(0)
g = torch.Generator().manual_seed(0)
x = torch.randn(64, 16, generator=g)
data = TensorDataset(x, precompute(x))
trainer(max_epochs=1).fit(Distillation(), DataLoader(data, batch_size=8, shuffle=True))
