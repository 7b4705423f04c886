import time
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def prepare_data(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(120, 7, generator=g)
        torch.save((x, (x[:, 0] > x[:, 1]).long()), "points.pt")

    def setup(self, stage):
        x, y = torch.load("points.pt")
        self.parts = {"fit": TensorDataset(x[:96], y[:96]), "val": TensorDataset(x[96:], y[96:])}

    def train_dataloader(self):
        return DataLoader(self.parts["fit"], batch_size=6, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts["val"], batch_size=6)

    def predict_dataloader(self):
        return DataLoader(self.parts["val"], batch_size=6)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 2))
        self.acc = torchmetrics.classification.MulticlassAccuracy(2, average="micro")

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.acc.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        value = self.acc.compute()
        self.acc.reset()
        self.log("val/acc", value, sync_dist=False, rank_zero_only=False)

    def predict_step(self, batch, _):
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Average(L.Callback):
    def on_fit_start(self, trainer, module):
        self.model = AveragedModel(module.net)

    def on_train_batch_end(self, trainer, module, *_):
        self.model.update_parameters(module.net)


class Writer(BasePredictionWriter):
    def write_on_epoch_end(self, trainer, module, predictions, indices):
        torch.save(predictions, Path(trainer.default_root_dir) / f"predictions_{trainer.global_rank}.pt")


@rank_zero_only
def write_summary(folder, trainer):
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "summary.txt").write_text(f"{trainer.callback_metrics['val/acc']:.4f}\n")


def main():
    L.seed_everything(7, workers=True)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2, logger=False,
                        callbacks=[Average(), Writer("epoch")], enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    data = Data()
    trainer.fit(Model(), datamodule=data)
    name = trainer.strategy.broadcast(f"run-{int(time.time())}")
    write_summary(name, trainer)
    trainer.predict(trainer.lightning_module, datamodule=data, return_predictions=False)


if __name__ == "__main__":
    main()
