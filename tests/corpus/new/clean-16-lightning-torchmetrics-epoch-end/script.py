import os
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader, Dataset, random_split


class Toxicity(Dataset):
    def __init__(self, n=180):
        g = torch.Generator().manual_seed(77)
        self.x = torch.randn(n, 11, generator=g)
        self.y = (self.x[:, :4].sum(1) > 0.5).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(11, 22), nn.Dropout(0.1), nn.ReLU(), nn.Linear(22, 2))
        self.f1 = torchmetrics.F1Score(task="binary")
        self.val_loss = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss_step", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.f1.update(logits.argmax(1), y)
        self.val_loss.update(nn.functional.cross_entropy(logits, y), weight=len(y))

    def on_validation_epoch_end(self):
        # compute() reduces over the processes, so the values are equal everywhere
        f1, loss = self.f1.compute(), self.val_loss.compute()
        self.log_dict({"val_f1": f1, "val_loss": loss})
        self.f1.reset()
        self.val_loss.reset()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_loss"}}


class History(Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        with Path("history.txt").open("a") as f:
            f.write(f"{trainer.current_epoch} {float(trainer.callback_metrics['val_f1']):.4f}\n")


if __name__ == "__main__":
    pl.seed_everything(3)
    train, val = random_split(Toxicity(), [140, 40], generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=3,
        accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[History(), EarlyStopping("val_loss", patience=2)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(train, batch_size=7, shuffle=True), DataLoader(val, batch_size=10))
    if trainer.is_global_zero:
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items() if k.startswith("val")}, flush=True)
