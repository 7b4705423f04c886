import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(3)
        self.train = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
    )
    trainer.fit(Regression(), datamodule=Data())
