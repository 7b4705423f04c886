import copy

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class WeightAverage(L.Callback):
    def __init__(self, decay=0.9):
        self.decay, self.average, self.backup = decay, None, None

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not trainer.is_global_zero:
            return
        for ours, theirs in zip(self.average.parameters(), pl_module.net.parameters()):
            ours.lerp_(theirs, 1 - self.decay)

    def on_validation_epoch_start(self, trainer, pl_module):
        if self.average is not None and not trainer.sanity_checking:
            self.backup = copy.deepcopy(pl_module.net.state_dict())
            pl_module.net.load_state_dict(self.average.state_dict())

    def on_validation_epoch_end(self, trainer, pl_module):
        if self.backup is not None:
            pl_module.net.load_state_dict(self.backup)
            self.backup = None


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_mse", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def sets():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 5, generator=g)
    y = x.sum(1, keepdim=True).sin()
    return TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])


def main():
    L.seed_everything(1)
    train, val = sets()
    trainer = L.Trainer(accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, callbacks=[WeightAverage()],
                        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Regressor(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=8))
    if trainer.is_global_zero:
        print(trainer.callback_metrics)


if __name__ == "__main__":
    main()
