import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Module(L.LightningModule):
    def __init__(self, data):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.data = data

    def train_dataloader(self):
        sampler = DistributedSampler(self.data, num_replicas=self.trainer.world_size, rank=0)
        return DataLoader(self.data, batch_size=8, sampler=sampler)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, generator=g), torch.randn(64, 1, generator=g))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, use_distributed_sampler=False, logger=False
    )
    trainer.fit(Module(data))
