import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Auto(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 2)
        self.decoder = nn.Linear(2, 8)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def main():
    pl.seed_everything(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, shuffle=True)
    model = Auto()
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        torch.save(model.encoder.state_dict(), "encoder.pt")


if __name__ == "__main__":
    main()
