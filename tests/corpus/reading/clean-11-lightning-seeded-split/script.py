import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Data(L.LightningDataModule):
    def prepare_data(self):
        with open("ready.txt", "w") as file:
            file.write("ready")

    def setup(self, stage=None):
        x = torch.linspace(-1, 1, 200).unsqueeze(1)
        self.train, self.val = random_split(TensorDataset(x, x**2), [160, 40])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Square(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def main():
    L.seed_everything(17, workers=True)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_progress_bar=False,
                        logger=False, enable_checkpointing=False)
    trainer.fit(Square(), datamodule=Data())


if __name__ == "__main__":
    main()
