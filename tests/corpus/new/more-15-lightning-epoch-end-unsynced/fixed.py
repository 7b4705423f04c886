import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class StockWindows(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(n, 8, generator=g).cumsum(1)
        self.t = self.w[:, -1] * 0.5 + 0.4 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.w)

    def __getitem__(self, i):
        return self.w[i], self.t[i]


def spearman(a, b):
    ra, rb = a.argsort().argsort().double(), b.argsort().argsort().double()
    ra, rb = ra - ra.mean(), rb - rb.mean()
    return (ra * rb).sum() / (ra.norm() * rb.norm())


class Ranker(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1))
        self.val_pred, self.val_true = [], []

    def training_step(self, batch, batch_idx):
        w, t = batch
        return F.mse_loss(self.net(w).squeeze(1), t)

    def validation_step(self, batch, batch_idx):
        w, t = batch
        self.val_pred.append(self.net(w).squeeze(1))
        self.val_true.append(t)

    def on_validation_epoch_end(self):
        pred, true = torch.cat(self.val_pred), torch.cat(self.val_true)
        pred, true = self.all_gather(pred).flatten(), self.all_gather(true).flatten()
        rho = spearman(pred, true).float()
        self.log("val_spearman", rho, prog_bar=True, rank_zero_only=True)
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: spearman {rho:.4f} on {len(pred)} windows", flush=True)
        self.val_pred.clear()
        self.val_true.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    L.seed_everything(8)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=2,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Ranker(), DataLoader(StockWindows(128, 0), 8, shuffle=True), DataLoader(StockWindows(64, 1), 8))
