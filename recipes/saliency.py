"""Where people look: a density of fixations for every image, learnt from HDF5 files, judged by NSS, AUC, CC and KL."""

from pathlib import Path
from typing import Annotated

import h5py
import numpy as np
import torch
import typer
from matplotlib.image import imsave
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate
from torch.utils.data import Subset

from samestep import Run
from samestep.data import HDF5Dataset
from samestep.errors import DataError

LAYOUT = (
    "a folder with the files of pysaliency: stimuli.hdf5 (datasets 0, 1, 2, ... of (height, width, 3) bytes; or "
    "`filenames`, relative to it) and fixations.hdf5 (train_xs, train_ys: a scanpath a row; train_ns: the image)"
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def scene(number: int, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """A SYNTHETIC image and the density of looks at it: at warm discs, not at cold ones, and a little at the middle."""
    luck = np.random.default_rng(number)
    rows, columns = np.mgrid[:height, :width] + 0.5
    ground = interpolate(torch.tensor(luck.uniform(60, 150, (1, 3, 4, 5))), (height, width), mode="bicubic")[0]
    image = ground.permute(1, 2, 0).numpy() + luck.normal(0, 8, (height, width, 3))
    off = (columns / width - 0.5) ** 2 + (rows / height - 0.5) ** 2
    density = 0.2 * np.exp(-off / 0.08) / (0.25 * width * height)
    for warm in (True,) * luck.integers(1, 4) + (False,) * luck.integers(2, 5):
        x, y, radius = luck.uniform(0.1, 0.9) * width, luck.uniform(0.1, 0.9) * height, luck.uniform(0.04, 0.08) * width
        square = (columns - x) ** 2 + (rows - y) ** 2
        colours = ((180, 60, 0), (255, 160, 60)) if warm else ((0, 60, 120), (90, 160, 255))
        image[square < radius**2] = luck.uniform(*colours)
        density += warm * np.exp(-square / (2 * radius**2)) / (2 * np.pi * radius**2)
    return image.clip(0, 255).astype(np.uint8), density / density.sum()


def generate(folder: Path, count: int, width: int, height: int) -> None:
    """Write scenes, and looks of ten made-up people at each, as pysaliency would."""
    folder.mkdir(parents=True)
    luck, looks = np.random.default_rng(0), []
    with h5py.File(folder / "stimuli.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"Stimuli", b"1.1"
        for number in range(count):
            file[str(number)], density = scene(number, width, height)
            looks.append(luck.choice(width * height, (10, 6), p=density.ravel()))
    with h5py.File(folder / "fixations.hdf5", "w") as file:
        file.attrs["type"], file.attrs["version"] = b"FixationTrains", b"1.2"
        places = np.concatenate(looks)
        file["train_ys"], file["train_xs"] = (each + 0.5 for each in np.divmod(places, width))
        file["train_ts"] = np.tile(np.arange(6.0), (len(places), 1))
        file["train_ns"], file["train_subjects"] = np.repeat(np.arange(count), 10), np.tile(np.arange(10), count)


def pair(folder: Path, target: Path, width: int, height: int) -> None:
    """Write images and fixations at one size, a row a sample: what every rank and worker reads from then on."""
    for name in ("stimuli.hdf5", "fixations.hdf5"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no {name}: --data expects {LAYOUT}")
    with h5py.File(folder / "stimuli.hdf5") as stimuli, h5py.File(folder / "fixations.hdf5") as file:
        names = stimuli["filenames"].asstr()[:] if "filenames" in stimuli else None
        count = len(stimuli) if names is None else len(names)
        xs, ys, ns = file["train_xs"][:], file["train_ys"][:], file["train_ns"][:].astype(int)
        most = max(int(np.isfinite(xs[ns == number]).sum()) for number in range(count))
        with h5py.File(target, "w") as out:
            images = out.create_dataset("images", (count, 3, height, width), np.uint8, chunks=(1, 3, height, width))
            fixations = out.create_dataset("fixations", (count, most, 2), np.int32, fillvalue=-1)
            for number in range(count):
                image = (
                    Image.fromarray(stimuli[str(number)][:]) if names is None else Image.open(folder / names[number])
                )
                images[number] = np.asarray(image.convert("RGB").resize((width, height))).transpose(2, 0, 1)
                x, y = xs[ns == number] * width / image.width, ys[ns == number] * height / image.height
                inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)  # not so where a scanpath has ended: NaN
                fixations[number, : inside.sum()] = np.stack([y[inside], x[inside]], axis=1)


class Saliency(nn.Module):
    """A convolutional net: the logarithm of a density, which sums to one over the pixels of an image."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        shapes = [(5, width, 1), *((width * 2 ** min(at, 3), width * 2 ** min(at + 1, 3), 2) for at in range(levels))]
        shapes += [(shapes[-1][1], shapes[-1][1], 1)] * 3
        layers = ((nn.Conv2d(a, b, 5, s, 2, bias=False), nn.GroupNorm(4, b), nn.SiLU()) for a, b, s in shapes)
        self.layers = nn.Sequential(
            *(layer for three in layers for layer in three), nn.Conv2d(shapes[-1][1], 1, 1, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images of bytes, (rows, 3, height, width), to (rows, height, width)."""
        rows, _, height, width = images.shape
        y, x = (torch.linspace(-1, 1, length, device=images.device) for length in (height, width))
        place = torch.stack([y[:, None].expand(height, width), x.expand(height, width)])  # so that it knows the middle
        coarse = self.layers(torch.cat([images / 64 - 2, place.expand(rows, -1, -1, -1)], dim=1))
        whole = interpolate(coarse, (height, width), mode="bilinear")
        return whole.flatten(1).log_softmax(dim=1).view(rows, height, width)


def looks(fixations: Tensor, height: int, width: int) -> Tensor:
    """How often each pixel was looked at, (rows, height, width); what fills up the rows of fixations is left out."""
    places = torch.where(fixations[..., 0] >= 0, fixations[..., 0] * width + fixations[..., 1], height * width).long()
    counts = torch.zeros(len(places), height * width + 1, device=places.device)
    return counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))[:, :-1].view(-1, height, width)


def blurred(counts: Tensor, sigma: float) -> Tensor:
    """Looks as a density: a Gaussian at each of them."""
    reach = int(3 * sigma) + 1
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=counts.device) / sigma) ** 2)[None, None]
    soft = conv2d(conv2d(counts[:, None], bell[..., None], padding=(reach, 0)), bell[..., None, :], padding=(0, reach))
    return soft[:, 0] / soft.sum(dim=(1, 2, 3))[:, None, None]


def area(values: Tensor, seen: Tensor) -> Tensor:
    """AUC-Judd of one image: thresholds at the pixels looked at, all other pixels as negatives."""
    levels, everything = values[seen].sort(descending=True).values, values.flatten().sort().values
    hits = torch.arange(1, len(levels) + 1, device=values.device)
    above = everything.numel() - torch.searchsorted(everything, levels)
    false = (above - hits) / (everything.numel() - len(levels))
    ends = torch.zeros(1, device=values.device), torch.ones(1, device=values.device)
    return torch.trapezoid(torch.cat([ends[0], hits / len(levels), ends[1]]), torch.cat([ends[0], false, ends[1]]))


def measures(logs: Tensor, counts: Tensor, sigma: float) -> dict[str, Tensor]:
    """NSS, AUC-Judd, CC and KL, one value an image."""
    density, truth = logs.exp(), blurred(counts, sigma)
    standard, other = (
        (map - map.mean((1, 2), True)) / map.std((1, 2), correction=0, keepdim=True) for map in (density, truth)
    )
    return {
        "nss": (standard * counts).sum((1, 2)) / counts.sum((1, 2)),
        "auc_judd": torch.stack([area(one, seen) for one, seen in zip(density, counts > 0, strict=True)]),
        "cc": (standard * other).mean((1, 2)),
        "kl": (truth * ((truth + 1e-12).log() - logs)).sum((1, 2)),
    }


def picture(path: Path, image: Tensor, *maps: Tensor) -> None:
    """Some images, below each what people looked at and what the model expects."""
    rows = [torch.cat([*(one / one.amax() * 255 for one in each)], dim=1) for each in maps]
    grey = [row[..., None].expand(-1, -1, 3) for row in rows]
    imsave(path, torch.cat([torch.cat([*image.permute(0, 2, 3, 1)], dim=1).float(), *grey]).byte().cpu().numpy())


@app.command()
def main(
    data: Annotated[Path | None, typer.Option(help=LAYOUT + "; default: synthetic scenes, made at the start")] = None,
    out: Annotated[Path | None, typer.Option(help="where logs, weights and pictures go")] = None,
    epochs: int = 12,
    global_batch: Annotated[int, typer.Option(help="images in a step, over all ranks")] = 16,
    width: Annotated[int, typer.Option(help="pixels of an image; 1024 for MIT1003")] = 64,
    height: Annotated[int, typer.Option(help="768 for MIT1003")] = 48,
    channels: Annotated[int, typer.Option(help="of the first layer")] = 16,
    levels: Annotated[int, typer.Option(help="how often images are halved; 4 for MIT1003")] = 1,
    learning_rate: float = 3e-3,
    entropy: Annotated[float, typer.Option(help="reward for each nat of entropy: flatter densities")] = 0.0,
    seed: int = 0,
) -> None:
    """Train on four fifths of the images, measure on every fifth after every epoch, keep weights and a picture."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        if data is None and not run.once((run.folder / "synthetic").exists):
            run.say("no --data: the images and fixations of this run are SYNTHETIC")
            run.once(generate, run.folder / "synthetic", 400, width, height)
        pairs = run.folder / f"pairs-{width}x{height}.hdf5"
        run.once(pair, data or run.folder / "synthetic", pairs, width, height)
        everything = HDF5Dataset(pairs, keys=["images", "fixations"])
        train_set = Subset(everything, [at for at in range(len(everything)) if at % 5])
        train, test = run.shard(train_set, shuffle=True), run.shard(Subset(everything, range(0, len(everything), 5)))
        model = run.wrap(Saliency(channels, levels))
        # A larger eps than Adam's own: a gradient that is zero but for rounding must not become a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-6)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for images, fixations in step:
                    counts, mirror = looks(fixations, height, width), step.random(1, 1) < 0.5
                    counts = torch.where(mirror, counts.flip(-1), counts)
                    logs = model(torch.where(mirror[..., None], images.flip(-1), images))
                    nats = -(logs.exp() * logs).sum((1, 2))
                    step.mean(-(counts * logs).sum((1, 2)) / counts.sum((1, 2)) - entropy * nats).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

            with run.evaluate(model) as net:
                found = run.means(
                    measures(net(x), looks(fixations, height, width), width / 30) for x, fixations in test
                )
            run.log({f"val/{name}": value for name, value in found.items()}, step=epoch.number)

        images, fixations = (
            torch.stack(each).to(run.device) for each in zip(*(everything[at] for at in range(0, 30, 5)), strict=True)
        )
        with run.evaluate(model) as net:
            maps = blurred(looks(fixations, height, width), width / 30), net(images).exp()
        run.once(picture, run.folder / "maps.png", images, *maps)
        run.once(torch.save, {name: value.cpu() for name, value in net.state_dict().items()}, run.folder / "weights.pt")


if __name__ == "__main__":
    app()
