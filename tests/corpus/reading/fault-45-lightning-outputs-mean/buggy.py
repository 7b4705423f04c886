import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.hits, self.count = 0, 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.hits += (self.layer(x).argmax(1) == y).sum()
        self.count += len(y)

    def on_validation_epoch_end(self):
        accuracy = self.hits / self.count
        self.print(f"epoch {self.current_epoch}: accuracy {accuracy:.3f}")
        self.hits, self.count = 0, 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, generator=g), torch.randint(0, 2, (64,), generator=g))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False)
    trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
