"""Saliency: predict where people look in an image, from fixations in HDF5 files; evaluated by NSS, AUC, CC and KL."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.image import imsave
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import Subset

from samestep import Run
from samestep.assets import write_scenes
from samestep.data import HDF5Dataset, convert_pysaliency
from samestep.nn import fixation_counts, fixation_density, saliency_metrics

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Saliency(nn.Module):
    """A convolutional network that returns the logarithm of a density over the pixels of an image."""

    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        widths = [channels * 2 ** min(level, 3) for level in range(levels + 1)]
        shapes = [(5, channels, 1), *((a, b, 2) for a, b in pairwise(widths))]
        shapes += [(widths[-1], widths[-1], 1)] * 3
        layers: list[nn.Module] = []
        for inputs, outputs, stride in shapes:
            conv = nn.Conv2d(inputs, outputs, 5, stride, 2, bias=False)
            layers += [conv, nn.GroupNorm(math.gcd(4, outputs), outputs), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 1, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        """From images of bytes, (rows, 3, height, width), to log densities (rows, height, width)."""
        rows, _, height, width = images.shape
        y, x = (torch.linspace(-1, 1, length, device=images.device) for length in (height, width))
        position = torch.stack([y[:, None].expand(height, width), x.expand(height, width)])  # people look at the center
        coarse = self.layers(torch.cat([images / 64 - 2, position.expand(rows, -1, -1, -1)], dim=1))
        logits = interpolate(coarse, (height, width), mode="bilinear")
        return logits.flatten(1).log_softmax(dim=1).view(rows, height, width)


def build(channels: int = 16, levels: int = 1, width: int = 64, height: int = 48) -> tuple[Saliency, Tensor]:
    """The model and an example batch, for `samestep plan`."""
    return Saliency(channels, levels), torch.zeros(2, 3, height, width, dtype=torch.uint8)


def save_maps(path: Path, images: Tensor, *maps: Tensor) -> None:
    """Write a grid: images in the first row, blurred fixations in the second, predictions in the third."""
    rows = [torch.cat([*(density / density.amax() * 255 for density in each)], dim=1) for each in maps]
    gray = [row[..., None].expand(-1, -1, 3) for row in rows]
    imsave(path, torch.cat([torch.cat([*images.permute(0, 2, 3, 1)], dim=1).float(), *gray]).byte().cpu().numpy())


@app.command()
def main(
    data: Annotated[
        Path | None, typer.Option(help="a folder with pysaliency's files; default: synthetic scenes")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for logs, weights and images")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    global_batch: Annotated[int, typer.Option(min=1, help="images per step, over all ranks")] = 16,
    width: Annotated[int, typer.Option(min=8, help="of the images in pixels; 1024 for MIT1003")] = 64,
    height: Annotated[int, typer.Option(min=8, help="of the images in pixels; 768 for MIT1003")] = 48,
    channels: Annotated[int, typer.Option(min=1, help="of the first layer")] = 16,
    levels: Annotated[int, typer.Option(min=0, help="number of downsampling layers; 4 for MIT1003")] = 1,
    learning_rate: float = 3e-3,
    entropy: Annotated[float, typer.Option(help="weight of the entropy bonus, for flatter densities")] = 0.0,
    seed: int = 0,
) -> None:
    """Train on four fifths of the images, evaluate on the others after every epoch, save weights and example maps."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        if data is None and not run.once((run.folder / "synthetic").exists):
            run.print("--data was not given: the images and fixations of this run are SYNTHETIC")
            run.once(write_scenes, run.folder / "synthetic", 400, width, height)
        pairs = run.folder / f"pairs-{width}x{height}.hdf5"
        run.once(convert_pysaliency, data or run.folder / "synthetic", pairs, width, height)
        dataset = HDF5Dataset(pairs, keys=["images", "fixations"])
        train_set = Subset(dataset, [index for index in range(len(dataset)) if index % 5])
        train, test = run.shard(train_set, shuffle=True), run.shard(Subset(dataset, range(0, len(dataset), 5)))
        net, _ = build(channels, levels, width, height)
        model = run.wrap(net)
        # A larger eps than Adam's default: a gradient of rounding errors only must not become a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-6)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for images, fixations in step:
                    counts, mirror = fixation_counts(fixations, height, width), step.random(1, 1) < 0.5
                    counts = torch.where(mirror, counts.flip(-1), counts)
                    log_density = model(torch.where(mirror[..., None], images.flip(-1), images))
                    nats = -(log_density.exp() * log_density).sum((1, 2))
                    losses = -(counts * log_density).sum((1, 2)) / counts.sum((1, 2)) - entropy * nats
                    step.mean(losses).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

            with run.evaluate(model) as net:
                metrics = run.means(
                    saliency_metrics(net(images), fixation_counts(fixations, height, width), sigma=width / 30)
                    for images, fixations in test
                )
            run.log({f"val/{name}": value for name, value in metrics.items()}, step=epoch.number)

        shown = [dataset[index] for index in range(0, min(30, len(dataset)), 5)]
        images, fixations = (torch.stack(each).to(run.device) for each in zip(*shown, strict=True))
        with run.evaluate(model) as net:
            maps = fixation_density(fixation_counts(fixations, height, width), width / 30), net(images).exp()
        run.once(save_maps, run.folder / "maps.png", images, *maps)
        run.once(torch.save, {name: value.cpu() for name, value in net.state_dict().items()}, run.folder / "weights.pt")
        run.print(f"maps.png, weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
