import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Spirals(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(5)
        t = torch.rand(n, generator=g) * 6
        self.label = torch.arange(n) % 2
        sign = 1.0 - 2.0 * self.label
        self.points = torch.stack([sign * t.cos() * t, sign * t.sin() * t], 1)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, idx):
        return self.points[idx], self.label[idx]


class SpiralData(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        full = Spirals()
        self.train, self.val = random_split(full, [128, 32], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=SpiralData())
