from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def __init__(self, path="tokens.pt"):
        super().__init__()
        self.path = Path(path)

    def prepare_data(self):
        pass

    def setup(self, stage):
        if not self.path.exists():
            g = torch.Generator().manual_seed(0)
            torch.save(torch.randn(64, 4, generator=g), self.path)
        self.x = torch.load(self.path, map_location="cpu")

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x), batch_size=8, shuffle=True)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False).fit(Net(), datamodule=Data())
