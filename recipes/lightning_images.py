"""Images in a Lightning Trainer: progressive resizing, label smoothing, and the same weights on any number of ranks."""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, interpolate
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassF1Score

from samestep import epoch_setting, sample_rng
from samestep.lightning import FileLogger, SameStep, launcher_args, once

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Digits(Dataset[tuple[Tensor, int]]):
    """Handwritten digits from scikit-learn at the image size of the epoch, shifted by up to a pixel in training."""

    def __init__(self, start: int, stop: int, shift: bool) -> None:
        data, self.shift = load_digits(), shift
        self.images = torch.tensor(data.images[start:stop], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = data.target[start:stop].tolist()

    def __len__(self) -> int:
        """The number of digits."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One digit; its shift is keyed by sample, so it does not depend on ranks and workers."""
        image = self.images[index]
        if self.shift:
            x, y = torch.randint(-1, 2, (2,), generator=sample_rng()).tolist()
            image = image.roll((y, x), dims=(1, 2))
        size = epoch_setting()
        return interpolate(image[None], size=(size, size), mode="bilinear", antialias=True)[0], self.labels[index]


class DigitsData(LightningDataModule):
    """An ordinary LightningDataModule; SameStep replaces its samplers."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader:
        """1,500 digits."""
        return DataLoader(Digits(0, 1500, shift=True), batch_size=32, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        """297 digits."""
        return DataLoader(Digits(1500, 1797, shift=False), batch_size=128)


class Block(nn.Module):
    """A residual block. It uses GroupNorm: BatchNorm statistics depend on the number of ranks."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.GELU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """The sum of the body and the shortcut, through GELU."""
        return gelu(self.body(images) + self.skip(images))


class Images(LightningModule):
    """A small residual network without any code for ranks."""

    def __init__(self, lr: float, warm_up: float) -> None:
        super().__init__()
        self.lr, self.warm_up = lr, warm_up
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        self.f1 = MulticlassF1Score(10, average="macro")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss of this rank's rows; SameStep weights it by their number."""
        images, labels = batch
        loss = cross_entropy(self.net(images), labels, label_smoothing=0.1)
        self.log("epoch/loss", loss, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Loss, accuracy and macro F1; exact over all ranks without sync_dist."""
        images, labels = batch
        logits = self.net(images)
        self.f1(logits, labels)
        rows = len(labels)
        self.log("val/loss", cross_entropy(logits, labels), batch_size=rows)
        self.log("val/accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True, batch_size=rows)
        self.log("val/f1", self.f1, batch_size=rows)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with warm-up and cosine decay, updated every step."""
        # With Adam's default eps, a gradient of rounding errors only becomes a full step in a random direction.
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)
        total = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            warm_up = (step + 1) / (self.warm_up * total)
            return min(warm_up, 0.5 * (1 + math.cos(math.pi * step / total)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(lr: float = 5e-3) -> tuple[nn.Module, Tensor]:
    """The model and an example batch of the largest size, for `samestep plan`."""
    return Images(lr, warm_up=0.1).net, torch.zeros(2, 1, 16, 16)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="folder for logs and weights")] = Path("runs/lightning_images"),
    epochs: Annotated[int, typer.Option(min=1)] = 6,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 100,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="maximum rows per forward pass")] = None,
    lr: float = 5e-3,
    num_workers: Annotated[int, typer.Option(min=0, help="data workers per rank")] = 0,
    seed: int = 0,
) -> None:
    """Train while the images grow from 8 to 16 pixels, and save the weights."""
    torch.manual_seed(seed)
    same = SameStep(
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        epoch_settings=lambda epoch: 8 + 4 * min(2, 3 * epoch // epochs),
    )
    files = FileLogger(out)
    options = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=epochs, callbacks=[same, files], **options, **launcher_args())
    module = Images(lr, warm_up=0.1)
    trainer.fit(module, datamodule=same.datamodule(DigitsData(num_workers)))
    weights = {name: value.cpu() for name, value in module.net.state_dict().items()}
    once(trainer, torch.save, weights, out / "weights.pt")
    once(trainer, print, f"weights and logs: {out}")


if __name__ == "__main__":
    app()
