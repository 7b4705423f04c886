import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset


class TwoPlayer(L.LightningModule):
    """Encoder against a critic that tries to read a nuisance variable."""

    def __init__(self, strength=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.task = nn.Linear(4, 2)
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y, nuisance = batch
        opt_main, opt_critic = self.optimizers()

        self.toggle_optimizer(opt_critic)
        critic_loss = F.mse_loss(self.critic(self.encoder(x).detach()).squeeze(1), nuisance)
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()
        self.untoggle_optimizer(opt_critic)

        self.toggle_optimizer(opt_main)
        z = self.encoder(x)
        task_loss = F.cross_entropy(self.task(z), y)
        main_loss = task_loss - self.hparams.strength * F.mse_loss(self.critic(z).squeeze(1), nuisance)
        opt_main.zero_grad()
        self.manual_backward(main_loss)
        self.clip_gradients(opt_main, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_main.step()
        self.untoggle_optimizer(opt_main)
        self.log_dict({"critic": critic_loss, "task": task_loss}, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        self.report({k: round(float(v), 4) for k, v in self.trainer.callback_metrics.items()})

    @rank_zero_only
    def report(self, metrics):
        print(f"epoch {self.current_epoch}", metrics, flush=True)

    def configure_optimizers(self):
        main = torch.optim.Adam([*self.encoder.parameters(), *self.task.parameters()], lr=5e-3)
        return main, torch.optim.SGD(self.critic.parameters(), lr=0.05)


def main():
    L.seed_everything(4)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 8, generator=g)
    data = TensorDataset(x, (x[:, 0] > 0).long(), x[:, 1])
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp_find_unused_parameters_true",
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(TwoPlayer(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
