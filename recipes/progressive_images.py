"""Image classification with a ResNet on images that grow by epoch: mixup, label smoothing, EMA, exact metrics."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from samestep import Run, epoch_setting, sample_numpy_rng
from samestep.data import LabeledImages, crop_square, read_images
from samestep.nn import class_counts, class_scores, resnet

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Preset:
    """Settings for a machine; `size` is the image size of the last epochs, in pixels."""

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


def digits() -> tuple[LabeledImages, LabeledImages]:
    """1,797 images of 8x8 pixels that ship with scikit-learn, 1,500 of them for training."""
    data = load_digits()
    images, labels = torch.tensor(data.images * 15).byte()[:, None], torch.tensor(data.target)
    return LabeledImages(images[:1500], labels[:1500]), LabeledImages(images[1500:], labels[1500:])


class Images(Dataset[tuple[Tensor, ...]]):
    """Images at the size of the epoch; in training cropped, mirrored and mixed with another, keyed by sample."""

    def __init__(self, source: LabeledImages, every: int, train: bool, mirror: bool) -> None:
        self.images, self.labels, self.every = source.images, source.labels[::every], every
        self.train, self.mirror = train, mirror

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """An image, its label, the label of the image mixed in, and the weight of the first label."""
        if not self.train:
            return self.crop(index, 1.0, (0.5, 0.5)), self.labels[index], self.labels[index], torch.tensor(1.0)
        rng = sample_numpy_rng()
        other, weight = int(rng.integers(len(self))), rng.beta(0.2, 0.2)
        one, two = (self.crop(each, rng.uniform(0.75, 1), rng.random(2)) for each in (index, other))
        mixed = weight * (one.flip(-1) if self.mirror and rng.random() < 0.5 else one) + (1 - weight) * two
        return mixed, self.labels[index], self.labels[other], torch.tensor(weight, dtype=torch.float32)

    def crop(self, index: int, part: float, position: tuple[float, float]) -> Tensor:
        """A square of an image at the size of this epoch, which is sent with each index, also to workers."""
        return crop_square(self.images[index * self.every].float() / 64 - 2, epoch_setting(), part, position)


def build(chosen: Preset = PRESETS["local"], channels: int = 1, classes: int = 10) -> tuple[nn.Module, Tensor]:
    """The model and an example batch, for `samestep plan`."""
    depth = 50 if chosen.net == "resnet50" else 18
    net = resnet(depth, channels=channels, classes=classes, width=chosen.width, small=chosen.size < 96)
    return net, torch.zeros(2, channels, chosen.size, chosen.size)


def learning_rate_factor(progress: float) -> float:
    """A linear warm-up in the first tenth of the training, then a cosine decay."""
    return 10 * progress if progress < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.1) / 0.9)


@app.command()
def main(
    preset: Annotated[
        Literal["local", "g5", "p3"], typer.Option(help="settings for a laptop, 4 A10G or 8 V100")
    ] = "local",
    data: Annotated[Path | None, typer.Option(help="a folder of classes, or of idx files; default: digits")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for logs, checkpoints and weights; resumes from it")] = None,
    net: Annotated[Literal["resnet18", "resnet50"] | None, typer.Option(help="default: from the preset")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="default: from the preset")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="samples per step, over all ranks")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="image size of the last epochs; the first have half")] = None,
    every: Annotated[int, typer.Option(min=1, help="use every N-th image, for a quick test")] = 1,
    seed: int = 0,
) -> None:
    """Train with warm-up and cosine decay; after every epoch evaluate and save the moving average of the weights."""
    options = {"net": net, "epochs": epochs, "global_batch": global_batch, "size": size}
    chosen = replace(PRESETS[preset], **{name: value for name, value in options.items() if value is not None})
    sources = digits() if data is None else read_images(data)
    classes, channels = int(sources[0].labels.max()) + 1, sources[0].images[0].shape[0]
    train_set, test_set = (Images(s, every, train=s is sources[0], mirror=data is not None) for s in sources)

    def size_of(epoch: int) -> int:
        """From half of the size to the full size at two thirds of the epochs, in steps of 4 pixels."""
        return 4 * round(chosen.size / 4 * min(1.0, 0.5 + 0.75 * epoch / chosen.epochs))

    with Run(global_batch=chosen.global_batch, seed=seed, folder=out, precision=chosen.precision) as run:
        inner, _ = build(chosen, channels, classes)
        model = run.wrap(inner, channels_last=run.device.type == "cuda")
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
        train = run.shard(train_set, shuffle=True, epoch_settings=size_of)
        test = run.shard(test_set, epoch_settings=lambda epoch: chosen.size)
        folder = run.folder / "checkpoints"
        checkpoint = run.checkpoint(folder, model=model, average=average, optimizer=optimizer, train=train)
        steps = chosen.epochs * train.steps_per_epoch
        smooth_loss = partial(cross_entropy, reduction="none", label_smoothing=0.1)

        for epoch in train.epochs(chosen.epochs):
            counts = torch.zeros(3, classes, dtype=torch.float64, device=run.device)
            test_counts, loss, seen, losses = counts.clone(), counts.new_zeros(()), 0, []
            for step in epoch:
                optimizer.param_groups[0]["lr"] = chosen.learning_rate * learning_rate_factor((step.number + 1) / steps)
                for image, label, other, weight in step:
                    scores, main_label = model(image), torch.where(weight > 0.5, label, other)
                    own_loss, other_loss = smooth_loss(scores, label), smooth_loss(scores, other)
                    step.mean(weight * own_loss + (1 - weight) * other_loss).backward()
                    counts += class_counts(main_label, scores.argmax(-1), classes, step.weights)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(inner)
                loss, seen = loss + step.loss * step.samples, seen + step.samples

            with run.evaluate(average) as averaged_net:
                for image, label, *_ in test:
                    scores = averaged_net(image)
                    losses.append(cross_entropy(scores, label, reduction="none"))
                    test_counts += class_counts(label, scores.argmax(-1), classes)
            metrics = {"epoch/loss": float(run.all_reduce(loss, "mean")) / seen, "val/loss": run.mean(losses)}
            for prefix, mine in {"epoch": counts, "val": test_counts}.items():
                totals = class_scores(run.all_reduce(mine, "sum"))
                metrics |= {f"{prefix}/{name}": value for name, value in totals.items()}
            run.log({**metrics, "epoch/image_size": size_of(epoch.number)}, step=epoch.number)
            checkpoint.save()
        weights = {name: value.cpu() for name, value in average.module.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
