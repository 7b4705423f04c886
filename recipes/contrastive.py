"""SimCLR on handwritten digits: each image is compared with all images of the global batch, on any number of ranks."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize, one_hot
from torch.utils.data import TensorDataset

from samestep import Run, Step

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8x8 pixels that ship with scikit-learn, 1,500 of them for training; labels are for evaluation."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def augment(images: torch.Tensor, step: Step) -> torch.Tensor:
    """Rotate, scale, stretch, shift and brighten each image by numbers that belong to its sample and to this call."""
    angle, scale, stretch, x, y, light = (2 * step.random(6) - 1).unbind(dim=1)
    angle, width, height = 0.35 * angle, 1 + 0.15 * (scale + stretch), 1 + 0.15 * (scale - stretch)
    rows = torch.stack([width * angle.cos(), -angle.sin(), 0.2 * x, angle.sin(), height * angle.cos(), 0.2 * y], dim=1)
    moved = grid_sample(images, affine_grid(rows.view(-1, 2, 3), list(images.shape), False), align_corners=False)
    return moved * (1 + 0.3 * light[:, None, None, None]) + 0.05 * step.normal(1, 8, 8)


class Encoder(nn.Module):
    """A small convolutional network and the projection that the loss sees; the features before it are more useful."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.GELU(),
            nn.Flatten(), nn.Linear(64 * 16, 64),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.GELU(), nn.Linear(64, 32))

    def forward(self, images: torch.Tensor, project: bool = True) -> torch.Tensor:
        """Directions, as vectors of length 1: of the projections, or of the features."""
        features = self.features(images)
        return normalize(self.projection(features) if project else features, dim=1)


def build() -> tuple[Encoder, torch.Tensor]:
    """The model and an example batch, for `samestep plan`."""
    return Encoder(), torch.zeros(2, 1, 8, 8)


def contrastive_losses(run: Run, step: Step, one: torch.Tensor, two: torch.Tensor, temperature: float) -> torch.Tensor:
    """NT-Xent, one loss per row: find the other view of the image among both views of the global batch."""
    all_one, all_two = run.gather(one), run.gather(two)
    losses = torch.zeros(len(one), device=one.device)
    for view, same, other in ((one, all_one, all_two), (two, all_two, all_one)):
        itself = one_hot(step.rows, step.samples).bool()
        among_same = (view @ same.T / temperature).masked_fill(itself, float("-inf"))
        scores = torch.cat([view @ other.T / temperature, among_same], dim=1)
        losses = losses + cross_entropy(scores, step.rows, reduction="none") / 2
    return losses


def class_centers(features: torch.Tensor, labels: torch.Tensor, per_class: int = 5) -> torch.Tensor:
    """The mean direction of the first few images of each class: all that this recipe learns from labels."""
    firsts = [features[(labels == number).nonzero()[:per_class, 0]] for number in range(10)]
    return normalize(torch.stack([first.mean(dim=0) for first in firsts]), dim=1)


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs and weights")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 250,
    temperature: Annotated[float, typer.Option(min=0.01, help="of the scores in the loss")] = 0.2,
    seed: int = 0,
) -> None:
    """Train without labels, evaluate with five labels per class after every epoch, save the weights."""
    train_set, test_set = digits()
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        model = run.wrap(Encoder())
        # an eps above rounding errors, which would become full steps in a random direction
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        train, test = run.shard(train_set, shuffle=True), run.shard(test_set)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for images, _ in step:
                    one, two = model(augment(images, step)), model(augment(images, step))
                    losses = contrastive_losses(run, step, one, two, temperature)
                    step.mean(losses).backward()
                    step.log({"train/alignment": (one * two).sum(dim=1)})
                optimizer.step()
                optimizer.zero_grad()

            with run.evaluate(model) as net:
                features = run.gather(net(images, project=False) for images, _ in train)  # in the order of the dataset
                centers = class_centers(features, run.gather(labels for _, labels in train))
                scores = ((net(images, project=False) @ centers.T, labels) for images, labels in test)
                accuracy = run.mean(each.argmax(dim=1) == labels for each, labels in scores)
            run.log({"epoch/accuracy": accuracy}, step=epoch.number)

        weights = {name: value.cpu() for name, value in net.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")
        run.print(f"weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
