"""Image classification by a ResNet on images that grow epoch by epoch: mixup, label smoothing, EMA, exact metrics."""

import gzip
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, silu
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from samestep import Run, current_setting, sample_numpy_rng
from samestep.errors import DataError

LAYOUT = (
    "a folder of classes (DATA/CLASS/*.jpg, every tenth for validation; or DATA/train/CLASS and DATA/val/CLASS, as in "
    "ImageNet), or one with MNIST's idx files (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-...)"
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Preset:
    """What suits a machine; `size` is the pixels of the last epochs, `global_batch` counts over all ranks."""

    net: Literal["resnet18", "resnet50"] = "resnet18"
    width: int = 16
    size: int = 24
    global_batch: int = 64
    epochs: int = 20
    learning_rate: float = 0.1
    precision: Literal["auto", "fp16"] = "auto"


PRESETS = {
    "local": Preset(),
    "g5": Preset("resnet50", 64, 224, global_batch=1024, epochs=60, learning_rate=1.0),  # 4 A10G
    "p3": Preset("resnet50", 64, 224, global_batch=2048, epochs=60, learning_rate=2.0, precision="fp16"),  # 8 V100
}


class Files:
    """Images in files, read when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = np.array([str(path) for path in paths])  # data workers share an array, and would copy a list

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def read(data: Path | None) -> list[tuple[Tensor | Files, Tensor]]:
    """Images of bytes and their labels, for training and for validation."""
    if data is None:
        digits = load_digits()
        images, labels = torch.tensor(digits.images * 15).byte()[:, None], torch.tensor(digits.target)
        return [(images[:1500], labels[:1500]), (images[1500:], labels[1500:])]
    if (data / "train-images-idx3-ubyte.gz").is_file():

        def plain(name: str) -> Tensor:
            return torch.frombuffer(bytearray(gzip.decompress((data / name).read_bytes())), dtype=torch.uint8)

        images, labels = (
            [plain(f"{kind}-{what}-ubyte.gz") for kind in ("train", "t10k")] for what in ("images-idx3", "labels-idx1")
        )
        return [(one[16:].view(-1, 1, 28, 28), two[8:].long()) for one, two in zip(images, labels, strict=True)]
    found = [path for path in sorted(data.rglob("*")) if path.suffix.lower() in {".jpg", ".jpeg", ".png"}]
    split = int((data / "train").is_dir())  # then the class is the second folder of a path, not the first
    files = [path for path in found if len(path.relative_to(data).parts) > split + 1]
    names = [path.relative_to(data).parts[split] for path in files]
    held = [path.is_relative_to(data / "val") if split else at % 10 == 9 for at, path in enumerate(files)]
    if len(classes := sorted(set(names))) < 2 or not any(held):
        raise DataError(f"{data} has no images of several classes: --data expects {LAYOUT}")
    parts = [[at for at in range(len(files)) if held[at] == wanted] for wanted in (False, True)]
    return [(Files([files[at] for at in p]), torch.tensor([classes.index(names[at]) for at in p])) for p in parts]


class Images(Dataset[tuple[Tensor, ...]]):
    """Images at the size of the epoch; in training cropped, mirrored and mixed with another by a sample's luck."""

    def __init__(self, source: tuple[Tensor | Files, Tensor], every: int, train: bool, mirror: bool) -> None:
        self.images, self.labels, self.every = source[0], source[1][::every], every
        self.train, self.mirror = train, mirror

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """An image, its label, the label of what is mixed in, and the share of its own."""
        if not self.train:
            return self.view(index, 1.0, (0.5, 0.5)), self.labels[index], self.labels[index], torch.tensor(1.0)
        luck = sample_numpy_rng()
        other, share = int(luck.integers(len(self))), luck.beta(0.2, 0.2)
        one, two = (self.view(at, luck.uniform(0.75, 1), luck.random(2)) for at in (index, other))
        mixed = share * (one.flip(-1) if self.mirror and luck.random() < 0.5 else one) + (1 - share) * two
        return mixed, self.labels[index], self.labels[other], torch.tensor(share, dtype=torch.float32)

    def view(self, index: int, part: float, place: tuple[float, float]) -> Tensor:
        """A square of an image, at the size of this epoch: it comes with each request, so workers see it too."""
        image, size = self.images[index * self.every], current_setting()
        side = round(part * min(image.shape[-2:]))
        top, left = (round(share * (length - side)) for share, length in zip(place, image.shape[-2:], strict=True))
        square = image[None, :, top : top + side, left : left + side].float() / 64 - 2
        return interpolate(square, (size, size), mode="bilinear", antialias=True)[0]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """GroupNorm, not BatchNorm: it looks at one sample, whatever else its rank holds."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(outputs // 8, outputs))


class Residual(nn.Module):
    """Two or three convolutions and a way around them. SiLU has no kink at which roundings part, as ReLU has."""

    def __init__(self, inputs: int, outputs: int, stride: int, deep: bool) -> None:
        super().__init__()
        slim = outputs // 4
        three = [(inputs, slim, 1, 1), (slim, slim, 3, stride), (slim, outputs, 1, 1)]
        two = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        layers = [layer for shape in (three if deep else two) for layer in (conv(*shape), nn.SiLU())]
        self.path = nn.Sequential(*layers[:-1])
        self.around = nn.Identity() if stride == 1 and inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return silu(self.path(x) + self.around(x))


def resnet(chosen: Preset, channels: int, classes: int) -> nn.Sequential:
    """ResNet-18 or ResNet-50; small images keep their size in the first layer."""
    deep, width = chosen.net == "resnet50", chosen.width
    wide = [conv(channels, width, 7, 2), nn.SiLU(), nn.MaxPool2d(3, 2, 1)]
    layers: list[nn.Module] = wide if chosen.size >= 96 else [conv(channels, width, 3), nn.SiLU()]
    inputs = width
    for stage, count in enumerate((3, 4, 6, 3) if deep else (2, 2, 2, 2)):
        for number in range(count):
            outputs = width * 2**stage * (4 if deep else 1)
            layers.append(Residual(inputs, outputs, 2 if stage and not number else 1, deep))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def tally(labels: Tensor, guesses: Tensor, weights: Tensor, classes: int) -> Tensor:
    """How often each class was guessed rightly, was guessed, and was there."""
    counted = ((labels, weights * (labels == guesses)), (guesses, weights), (labels, weights))
    return torch.stack([torch.bincount(which, weight.double(), classes) for which, weight in counted])


def metrics(name: str, loss: float, counts: Tensor) -> dict[str, float]:
    """Loss, accuracy and macro F1, from counts over all ranks."""
    right, guessed, there = counts
    f1 = (2 * right / (guessed + there).clamp(min=1)).mean()
    return {f"{name}/loss": loss, f"{name}/accuracy": float(right.sum() / there.sum()), f"{name}/macro_f1": float(f1)}


def rate(done: float) -> float:
    """The share of the peak learning rate: a warm-up in the first tenth, then a cosine."""
    return 10 * done if done < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.1) / 0.9)


@app.command()
def main(
    preset: Annotated[Literal["local", "g5", "p3"], typer.Option(help="what suits the machine")] = "local",
    data: Annotated[Path | None, typer.Option(help=LAYOUT + "; default: scikit-learn's digits")] = None,
    out: Annotated[Path | None, typer.Option(help="where logs, checkpoints and weights go")] = None,
    net: Annotated[Literal["resnet18", "resnet50"] | None, typer.Option(help="default: the preset's")] = None,
    epochs: Annotated[int | None, typer.Option(help="default: the preset's")] = None,
    global_batch: Annotated[int | None, typer.Option(help="samples in a step, over all ranks")] = None,
    size: Annotated[int | None, typer.Option(help="pixels of the last epochs; the first have half")] = None,
    every: Annotated[int, typer.Option(help="use every so-manieth image, for a trial")] = 1,
    seed: int = 0,
) -> None:
    """Train with warm-up and cosine; after every epoch evaluate the moving average of the weights, and keep it."""
    given = {"net": net, "epochs": epochs, "global_batch": global_batch, "size": size}
    chosen = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
    sources = read(data)
    classes, channels = int(sources[0][1].max()) + 1, sources[0][0][0].shape[0]
    train_set, test_set = (Images(s, every, train=s is sources[0], mirror=data is not None) for s in sources)

    def size_of(epoch: int) -> int:
        """Half of the size at first, all of it from two thirds of the epochs on, in steps of 4 pixels."""
        return 4 * round(chosen.size / 4 * min(1.0, 0.5 + 0.75 * epoch / chosen.epochs))

    with Run(global_batch=chosen.global_batch, seed=seed, folder=out, precision=chosen.precision) as run:
        inner = resnet(chosen, channels, classes)
        model = run.wrap(inner, channels_last=run.device.type == "cuda")
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
        train = run.shard(train_set, shuffle=True, settings=size_of)
        test = run.shard(test_set, settings=lambda epoch: chosen.size)
        state = {"model": model, "average": average, "optimizer": optimizer, "train": train}
        checkpoint = run.restore(run.folder / "checkpoints", **state)
        steps = chosen.epochs * train.steps_per_epoch
        smooth_loss = partial(cross_entropy, reduction="none", label_smoothing=0.1)

        for epoch in train.epochs(chosen.epochs):
            counts = torch.zeros(3, classes, dtype=torch.float64, device=run.device)
            loss, seen, losses = torch.zeros_like(counts[0, 0]), 0, []
            for step in epoch:
                optimizer.param_groups[0]["lr"] = chosen.learning_rate * rate((step.number + 1) / steps)
                for image, label, other, share in step:
                    scores = model(image)
                    step.mean(share * smooth_loss(scores, label) + (1 - share) * smooth_loss(scores, other)).backward()
                    counts += tally(torch.where(share > 0.5, label, other), scores.argmax(-1), step.weights, classes)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(inner)
                loss, seen = loss + step.loss * step.samples, seen + step.samples
            told = metrics("epoch", float(run.all_reduce(loss, "mean")) / seen, run.all_reduce(counts, "sum"))

            counts = torch.zeros_like(counts)
            with run.evaluate(average) as smooth:
                for image, label, *_ in test:
                    scores = smooth(image)
                    losses.append(cross_entropy(scores, label, reduction="none"))
                    counts += tally(label, scores.argmax(-1), torch.ones_like(losses[-1]), classes)
            told |= metrics("val", run.mean(losses), run.all_reduce(counts, "sum"))
            run.log({**told, "epoch/image_size": size_of(epoch.number)}, step=epoch.number)
            checkpoint.save()
        weights = {name: value.cpu() for name, value in average.module.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")


if __name__ == "__main__":
    app()
