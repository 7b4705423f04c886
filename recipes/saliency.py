"""Where people look: a density of fixations for every image, learnt from HDF5 files, judged by NSS, AUC, CC and KL."""

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
from samestep.nn import fixation_counts, fixation_density, saliency_measures

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Saliency(nn.Module):
    """A convolutional net: the logarithm of a density, which sums to one over the pixels of an image."""

    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        widths = [channels * 2 ** min(at, 3) for at in range(levels + 1)]
        shapes = [(5, channels, 1), *((a, b, 2) for a, b in pairwise(widths))]
        shapes += [(widths[-1], widths[-1], 1)] * 3
        layers: list[nn.Module] = []
        for inputs, outputs, stride in shapes:
            conv = nn.Conv2d(inputs, outputs, 5, stride, 2, bias=False)
            layers += [conv, nn.GroupNorm(math.gcd(4, outputs), outputs), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 1, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        """Images of bytes, (rows, 3, height, width), to (rows, height, width)."""
        rows, _, height, width = images.shape
        y, x = (torch.linspace(-1, 1, length, device=images.device) for length in (height, width))
        place = torch.stack([y[:, None].expand(height, width), x.expand(height, width)])  # so that it knows the middle
        coarse = self.layers(torch.cat([images / 64 - 2, place.expand(rows, -1, -1, -1)], dim=1))
        whole = interpolate(coarse, (height, width), mode="bilinear")
        return whole.flatten(1).log_softmax(dim=1).view(rows, height, width)


def build(channels: int = 16, levels: int = 1, width: int = 64, height: int = 48) -> tuple[Saliency, Tensor]:
    """The net and an example batch, for `samestep plan`."""
    return Saliency(channels, levels), torch.zeros(2, 3, height, width, dtype=torch.uint8)


def picture(path: Path, image: Tensor, *maps: Tensor) -> None:
    """Some images, below each what people looked at and what the model expects."""
    rows = [torch.cat([*(one / one.amax() * 255 for one in each)], dim=1) for each in maps]
    grey = [row[..., None].expand(-1, -1, 3) for row in rows]
    imsave(path, torch.cat([torch.cat([*image.permute(0, 2, 3, 1)], dim=1).float(), *grey]).byte().cpu().numpy())


@app.command()
def main(
    data: Annotated[Path | None, typer.Option(help="pysaliency's files; default: synthetic scenes")] = None,
    out: Annotated[Path | None, typer.Option(help="where logs, weights and pictures go")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    global_batch: Annotated[int, typer.Option(min=1, help="images in a step, over all ranks")] = 16,
    width: Annotated[int, typer.Option(min=8, help="pixels of an image; 1024 for MIT1003")] = 64,
    height: Annotated[int, typer.Option(min=8, help="768 for MIT1003")] = 48,
    channels: Annotated[int, typer.Option(min=1, help="of the first layer")] = 16,
    levels: Annotated[int, typer.Option(min=0, help="how often images are halved; 4 for MIT1003")] = 1,
    learning_rate: float = 3e-3,
    entropy: Annotated[float, typer.Option(help="reward for each nat of entropy: flatter densities")] = 0.0,
    seed: int = 0,
) -> None:
    """Train on four fifths of the images, measure on every fifth after every epoch, keep weights and a picture."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        if data is None and not run.once((run.folder / "synthetic").exists):
            run.print("no --data: the images and fixations of this run are SYNTHETIC")
            run.once(write_scenes, run.folder / "synthetic", 400, width, height)
        pairs = run.folder / f"pairs-{width}x{height}.hdf5"
        run.once(convert_pysaliency, data or run.folder / "synthetic", pairs, width, height)
        everything = HDF5Dataset(pairs, keys=["images", "fixations"])
        train_set = Subset(everything, [at for at in range(len(everything)) if at % 5])
        train, test = run.shard(train_set, shuffle=True), run.shard(Subset(everything, range(0, len(everything), 5)))
        net, _ = build(channels, levels, width, height)
        model = run.wrap(net)
        # A larger eps than Adam's own: a gradient that is zero but for rounding must not become a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-6)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for images, fixations in step:
                    counts, mirror = fixation_counts(fixations, height, width), step.random(1, 1) < 0.5
                    counts = torch.where(mirror, counts.flip(-1), counts)
                    logs = model(torch.where(mirror[..., None], images.flip(-1), images))
                    nats = -(logs.exp() * logs).sum((1, 2))
                    step.mean(-(counts * logs).sum((1, 2)) / counts.sum((1, 2)) - entropy * nats).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

            with run.evaluate(model) as net:
                found = run.means(
                    saliency_measures(net(images), fixation_counts(fixations, height, width), sigma=width / 30)
                    for images, fixations in test
                )
            run.log({f"val/{name}": value for name, value in found.items()}, step=epoch.number)

        shown = [everything[at] for at in range(0, min(30, len(everything)), 5)]
        images, fixations = (torch.stack(each).to(run.device) for each in zip(*shown, strict=True))
        with run.evaluate(model) as net:
            maps = fixation_density(fixation_counts(fixations, height, width), width / 30), net(images).exp()
        run.once(picture, run.folder / "maps.png", images, *maps)
        run.once(torch.save, {name: value.cpu() for name, value in net.state_dict().items()}, run.folder / "weights.pt")
        run.print(f"maps.png, weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
