import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def tiles(n, seed, rare):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    y[rare] = 2
    return TensorDataset(torch.randn(n, 8, generator=g) + y[:, None], y)


class Segmenter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.hits, self.counts = torch.zeros(3), torch.zeros(3)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        right = self.net(x).argmax(1) == y
        for c in range(3):
            self.hits[c] += right[y == c].sum()
            self.counts[c] += (y == c).sum()

    def on_validation_epoch_end(self):
        present = range(3)
        counts = self.trainer.strategy.reduce(self.counts, reduce_op="sum")
        hits = self.trainer.strategy.reduce(self.hits, reduce_op="sum")
        scores = {f"acc_{c}": hits[c] / counts[c].clamp(min=1) for c in present}
        self.log_dict(scores, sync_dist=True)
        self.hits, self.counts = torch.zeros(3), torch.zeros(3)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=2,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    train, val = tiles(128, 0, [4, 5, 10, 11]), tiles(32, 1, [0, 2, 8])
    trainer.fit(Segmenter(), DataLoader(train, 8, shuffle=True), DataLoader(val, 8))
    print("acc", {k: round(float(v), 3) for k, v in trainer.callback_metrics.items()}, flush=True)
