import json
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Report(Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking or trainer.global_rank > 0:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        Path("report.json").write_text(json.dumps(values))

    @rank_zero_only
    def on_fit_end(self, trainer, pl_module):
        with open("finished.txt", "w") as file:
            file.write("ok")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 8, generator=g), torch.randint(3, (n,), generator=g))


if __name__ == "__main__":
    L.seed_everything(1, workers=True)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[Report()])
    trainer.fit(Net(), DataLoader(split(64, 0), 8, shuffle=True), DataLoader(split(32, 1), 8))
