"""Handwritten digits: the smallest complete training, with the loop of the README."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8x8 pixels that ship with scikit-learn, 1,500 of them for training."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


class Net(nn.Sequential):
    """A small convolutional network. It uses GroupNorm: BatchNorm statistics depend on the number of ranks."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.GELU(),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip


def build() -> tuple[Net, torch.Tensor]:
    """The model and an example batch, for `samestep plan`."""
    return Net(), torch.zeros(2, 1, 8, 8)


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs and weights")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 128,
    seed: int = 0,
) -> None:
    """Train, evaluate after every epoch, save the weights."""
    train_set, test_set = digits()
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        model = run.wrap(Net())
        # With Adam's default eps of 1e-8, a gradient of rounding errors only becomes a full step in a random direction,
        # which differs with the number of ranks.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        train, test = run.shard(train_set, shuffle=True), run.shard(test_set)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    losses = cross_entropy(model(inputs), labels, reduction="none")
                    step.mean(losses).backward()
                optimizer.step()
                optimizer.zero_grad()

            with run.evaluate(model) as net:
                accuracy = run.mean(net(inputs).argmax(-1) == labels for inputs, labels in test)
                loss = run.mean(cross_entropy(net(inputs), labels, reduction="none") for inputs, labels in train)
            run.log({"epoch/loss": loss, "epoch/accuracy": accuracy}, step=epoch.number)

        weights = {name: value.cpu() for name, value in net.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")
        run.print(f"weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
