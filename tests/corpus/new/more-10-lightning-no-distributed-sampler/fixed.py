import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TinyForecaster(pl.LightningModule):
    def __init__(self, window=12, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(1, 10, batch_first=True)
        self.head = nn.Linear(10, 1)

    def forward(self, series):
        out, _ = self.lstm(series.unsqueeze(-1))
        return self.head(out[:, -1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        series, nxt = batch
        loss = nn.functional.smooth_l1_loss(self(series), nxt)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}


class SeriesData(pl.LightningDataModule):
    def __init__(self, n=128, window=12):
        super().__init__()
        self.n, self.window = n, window

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(60)
        phase = torch.rand(self.n, 1, generator=g) * 6.28
        t = torch.arange(self.window + 1) * 0.4
        wave = torch.sin(t + phase)
        self.train_set = TensorDataset(wave[:, :-1], wave[:, -1])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)


def main():
    pl.seed_everything(17, workers=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(TinyForecaster(), datamodule=SeriesData())
    if trainer.is_global_zero:
        print("train_loss", round(trainer.callback_metrics["train_loss"].item(), 4), flush=True)


if __name__ == "__main__":
    main()
