import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Manual(L.LightningModule):
    def __init__(self, accumulate=4):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, generator=g), torch.randn(64, 1, generator=g))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
    trainer.fit(Manual(), DataLoader(data, batch_size=4, shuffle=True))
