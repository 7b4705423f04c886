"""Text to image by discrete diffusion with classifier-free guidance: a caption becomes a picture, pixel by pixel."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, TensorDataset

from samestep import Run, sample_rng
from samestep.errors import DataError
from samestep.nn import ConditioningDropout, guided

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASES = ("the digit {}", "a handwritten {}", "{}")
LAYOUT = "a .npz file with images (n, side, side) of whole grey levels from 0, labels (n,) and captions (n,)"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def read(path: Path | None) -> tuple[Tensor, Tensor, list[str]]:
    """Images (n, side, side), labels and captions: of a file, or the 1,797 digits that ship with scikit-learn."""
    if path is None:
        data = load_digits()
        captions = [PHRASES[i % len(PHRASES)].format(NAMES[label]) for i, label in enumerate(data.target)]
        return torch.tensor(data.images).long(), torch.tensor(data.target), captions
    if not path.is_file():
        raise DataError(f"{path} does not exist: --data expects {LAYOUT}")
    with np.load(path) as file:
        if missing := {"images", "labels", "captions"} - set(file):
            raise DataError(f"{path} lacks {', '.join(sorted(missing))}: --data expects {LAYOUT}")
        return (
            torch.tensor(file["images"]).long(),
            torch.tensor(file["labels"]).long(),
            list(map(str, file["captions"])),
        )


def spell(captions: list[str]) -> Tensor:
    """Captions as numbers of words, from 1; 0 fills the shorter ones."""
    rows = [text.split() for text in captions]
    numbers = {word: number for number, word in enumerate(sorted({word for row in rows for word in row}), start=1)}
    most = max(map(len, rows))
    return torch.tensor([[numbers[word] for word in row] + [0] * (most - len(row)) for row in rows])


def transformer(width: int, layers: int) -> nn.TransformerEncoder:
    """Pre-norm blocks without dropout, whose draws would depend on the number of ranks."""
    block = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class Denoiser(nn.Module):
    """Guesses hidden pixels from those that are seen and from a caption, which a text encoder of its own reads."""

    def __init__(self, words: int, length: int, levels: int, pixels: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(words, width), nn.Embedding(levels + 1, width)
        self.word_places = nn.Parameter(torch.randn(length, width))
        self.pixel_places = nn.Parameter(torch.randn(pixels, width))
        self.text, self.body = transformer(width, 1), transformer(width, layers)
        self.drop = ConditioningDropout(0.1, null="learned", shape=(width,))
        self.out = nn.Linear(width, levels)

    def forward(self, seen: Tensor, caption: Tensor, drop: Tensor | None = None) -> Tensor:
        """Scores of every level for every pixel; rows in `drop` do without their caption."""
        meaning = self.text(self.words(caption) + self.word_places).mean(dim=1)
        image = self.pixels(seen) + self.pixel_places + self.drop(meaning, drop)[:, None]
        return self.out(self.body(image))


class Wishes(Dataset[tuple[Tensor, ...]]):
    """Captions to draw. All luck of a picture is drawn here, keyed by its number: the same on any number of ranks."""

    def __init__(self, captions: Tensor, pixels: int, levels: int) -> None:
        self.captions, self.shape = captions, (pixels, levels)

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Number, caption, the order in which pixels appear, and Gumbel noise: each pixel is drawn once."""
        order = torch.rand(self.shape[0], generator=sample_rng()).argsort()
        noise = torch.rand(self.shape, generator=sample_rng()).clamp(1e-9)
        return torch.tensor(index), self.captions[index], order, -noise.log().neg().log()


def draw(net: nn.Module, caption: Tensor, order: Tensor, noise: Tensor, scale: float, passes: int) -> Tensor:
    """Pictures for captions: all pixels hidden at first, some more shown in each pass."""
    pixels, hidden = order.shape[1], noise.shape[2]
    seen = torch.full_like(order, hidden)
    every = torch.ones(len(seen), dtype=torch.bool, device=seen.device)
    for count in range(passes):
        scores = net(seen, caption)
        if scale != 1.0:
            scores = guided(scores, net(seen, caption, drop=every), scale)
        now = (order >= count * pixels // passes) & (order < (count + 1) * pixels // passes)
        seen = torch.where(now, (scores + noise).argmax(dim=-1), seen)
    return seen


def judge(pixels: Tensor, labels: Tensor, drawn: dict[str, Tensor], wished: Tensor) -> dict[str, float]:
    """The share of pictures that a classifier of the real images takes for what was asked for."""
    classifier = SVC(gamma="scale").fit(pixels.numpy(), labels.numpy())
    return {name: float((classifier.predict(each.numpy()) == wished.numpy()).mean()) for name, each in drawn.items()}


def save(folder: Path, net: nn.Module, drawn: dict[str, Tensor]) -> None:
    """Write the weights, and a grid of pictures: a column for each class, unguided ones left, guided ones right."""
    torch.save({name: value.cpu() for name, value in net.state_dict().items()}, folder / "weights.pt")
    framed = torch.cat([pad(images[:6], (1, 1, 1, 1, 0, 1)) for images in drawn.values()], dim=1)
    grid = framed.transpose(1, 2).flatten(2).flatten(0, 1)
    imsave(folder / "samples.png", grid.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy(), cmap="gray_r")


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="where logs, weights and pictures go")] = None,
    data: Annotated[Path | None, typer.Option(help=LAYOUT + "; default: scikit-learn's digits")] = None,
    epochs: int = 10,
    global_batch: Annotated[int, typer.Option(help="samples in a step, over all ranks")] = 64,
    seed: int = 0,
    width: int = 64,
    layers: int = 3,
    learning_rate: float = 5e-3,
    scale: Annotated[float, typer.Option(help="of guidance; 1 is none")] = 3.0,
    passes: Annotated[int, typer.Option(help="through the net for one picture")] = 32,
    draws: Annotated[int, typer.Option(min=1, help="pictures of each class to draw at the end")] = 20,
) -> None:
    """Train, then draw pictures with and without guidance and let a classifier of real images name them."""
    images, labels, captions = read(data)
    texts, pixels, levels = spell(captions), images.flatten(1), int(images.max()) + 1
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        net = Denoiser(int(texts.max()) + 1, texts.shape[1], levels, pixels.shape[1], width, layers)
        model = run.wrap(net)
        # A larger eps than Adam's own: a gradient that is zero but for rounding must not become a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-5)
        train = run.shard(TensorDataset(pixels, texts), shuffle=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for image, caption in step:
                    hide = step.random(image.shape[1]) < step.random(1)  # each sample its own share, 0 to all
                    scores = model(image.masked_fill(hide, levels), caption)
                    losses = cross_entropy(scores.transpose(1, 2), image, reduction="none")
                    step.mean(losses, mask=hide).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        classes = labels.unique()
        first = [
            labels.tolist().index(label) for label in classes.tolist()
        ]  # asked for in the words of its first caption
        wanted = texts[first].repeat(draws, 1)
        wishes = run.shard(Wishes(wanted, pixels.shape[1], levels), workers=0)
        drawn: dict[str, Tensor] = {}
        with run.evaluate(model) as net:
            for name, strength in {"unguided": 1.0, "guided": scale}.items():
                mine = torch.zeros(len(wanted), pixels.shape[1], dtype=torch.long, device=run.device)
                for number, *wish in wishes:
                    mine[number] = draw(net, *wish, strength, passes)
                drawn[name] = run.all_reduce(mine, "sum").cpu()  # each rank has drawn its part of them
        right = run.once(judge, pixels, labels, drawn, classes.repeat(draws))
        run.log({f"draws/{name}_accuracy": share for name, share in right.items()})
        for name, share in right.items():
            run.say(f"{name}: a classifier of the real images reads {share:.1%} of the pictures as what was asked for")
        pictures = {name: each.view(draws, len(classes), *images.shape[1:]) for name, each in drawn.items()}
        run.once(save, run.folder, net, pictures)


if __name__ == "__main__":
    app()
