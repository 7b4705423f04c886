import os
from datetime import timedelta

import lightning.pytorch as pl
import torch
import torch.nn as nn
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset


class Cells(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 1, 12, 12, generator=g)
        self.y = (self.x > 0.8).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Segmenter(pl.LightningModule):
    def __init__(self, ch=6):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, 1, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        inter = ((logits > 0) * y).sum()
        dice = 2 * inter / ((logits > 0).sum() + y.sum() + 1)
        self.log("val/loss", self.loss(logits, y), sync_dist=True)
        if self.trainer.is_global_zero:  # one curve is enough
            self.log("val/dice", dice, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=8)),
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Segmenter(), DataLoader(Cells(64, 0), batch_size=8, shuffle=True), DataLoader(Cells(32, 1), batch_size=8))
    if trainer.is_global_zero:
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()}, flush=True)


if __name__ == "__main__":
    main()
