"""Training in a Lightning Trainer on test ranks; the process group that Lightning opens is destroyed afterwards."""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests import warm

warm.PRELOADED.append("lightning.pytorch")  # 3 CPU seconds for each rank otherwise

# Warnings of Lightning about itself and this machine; none of samestep.
LIGHTNING_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The `srun` command is available on your system but is not used",
    r"The number of training batches \(.*\) is smaller than the logging interval",
    r"Checkpoint directory .* exists and is not empty",
    r"The '.*_dataloader' does not have many workers",
    r"It is recommended to use `self\.log\(.*sync_dist=True\)`",
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"You have overridden `on_after_batch_transfer` in `LightningModule` but have passed in a `LightningDataModule`",
    r"Using `DistributedSampler` with the dataloaders",
    r"Trying to infer the `batch_size` from an ambiguous collection",
    r"You called `self\.log\(.*\)` in your .* but have no logger configured",
    r"`lr_scheduler\.step\(\)` .*",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of Lightning; all others are errors, as in all tests."""
    import logging

    with warnings.catch_warnings():
        for text in LIGHTNING_WARNINGS:
            warnings.filterwarnings("ignore", message=text)
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            gc.collect()  # a wrapper that survives its process group can hang the next one


def closing(function, *arguments):
    """Run a training and destroy the process group that Lightning leaves open."""
    with quiet():
        value = function(*arguments)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        return value


def make_trainer(**options: Any):
    from lightning.pytorch import Trainer

    from samestep.lightning import launcher_args

    defaults: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1, "num_sanity_val_steps": 0, **launcher_args(),
    }  # fmt: skip
    return Trainer(**{**defaults, **options})


def numbers(n: int) -> TensorDataset:
    """Return rows whose label is their index."""
    inputs = torch.randn(n, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, torch.arange(float(n)))


def loader(n: int, rows: int = 4, shuffle: bool = True, workers: int = 0) -> DataLoader:
    return DataLoader(numbers(n), batch_size=rows, shuffle=shuffle, num_workers=workers)


def regression(lr: float = 0.01, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any):
    """Return an ordinary LightningModule that records the labels it gets."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.seen: list[list[int]] = []
            self.validated: list[int] = []

        def training_step(self, batch):
            inputs, labels = batch
            self.seen.append(labels.int().tolist())
            loss = ((self.net(inputs)[:, 0] - labels / 10) ** 2).mean()
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch):
            _, labels = batch
            self.validated += labels.int().tolist()
            self.log("val/label", labels.mean())
            self.log("val/synced", labels.mean(), sync_dist=True)
            self.log("val/largest", labels.max(), reduce_fx="max")
            self.log("val/count", float(len(labels)), reduce_fx="sum")

        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=lr, **options)

    return Regression()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def fit_numbers(n: int, given: dict[str, Any], options: dict[str, Any], checkpoint: str | None = None):
    """Train on `numbers(n)`; return (weights, labels seen, metrics, (epoch, step) at the end, labels validated)."""
    from samestep.lightning import SameStep

    same = SameStep(**{"global_batch": 8, "seed": 0, **given})
    trainer, module = make_trainer(callbacks=[same, *options.pop("callbacks", [])], **options), regression()
    trainer.fit(
        module, datamodule=same.dataloaders(train=loader(n), val=loader(n, rows=3, shuffle=False)), ckpt_path=checkpoint
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), module.seen, metrics, (trainer.current_epoch, trainer.global_step), module.validated


def fit(n, given, options, checkpoint=None):
    return closing(fit_numbers, n, given, options, checkpoint)
