"""Text to image by discrete diffusion with classifier-free guidance: a caption becomes a picture, pixel by pixel."""

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.image import imsave
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, TensorDataset

from samestep import Run, sample_rng
from samestep.assets import captioned_images
from samestep.nn import ConditioningDropout, guided, transformer, unmask, unmasking_noise

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def spell(captions: list[str]) -> Tensor:
    """Captions as numbers of words, from 1; 0 fills the shorter ones."""
    rows = [text.split() for text in captions]
    numbers = {word: number for number, word in enumerate(sorted({word for row in rows for word in row}), start=1)}
    most = max(map(len, rows))
    return torch.tensor([[numbers[word] for word in row] + [0] * (most - len(row)) for row in rows])


class Denoiser(nn.Module):
    """Guesses hidden pixels from those that are seen and from a caption, which a text encoder of its own reads."""

    def __init__(self, words: int, length: int, levels: int, pixels: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(words, width), nn.Embedding(levels + 1, width)
        self.word_places = nn.Parameter(torch.randn(length, width))
        self.pixel_places = nn.Parameter(torch.randn(pixels, width))
        self.text, self.body = transformer(width, 1, head=16), transformer(width, layers, head=16)
        self.drop = ConditioningDropout(0.1, null="learned", shape=(width,))
        self.out = nn.Linear(width, levels)

    def forward(self, seen: Tensor, caption: Tensor, drop: Tensor | None = None) -> Tensor:
        """Scores of every level for every pixel; rows in `drop` do without their caption."""
        meaning = self.text(self.words(caption) + self.word_places).mean(dim=1)
        image = self.pixels(seen) + self.pixel_places + self.drop(meaning, drop)[:, None]
        return self.out(self.body(image))


def build(
    words: int = 14, length: int = 3, levels: int = 17, pixels: int = 64, width: int = 64, layers: int = 3
) -> tuple[Denoiser, tuple[Tensor, ...]]:
    """The net and an example batch, for `samestep plan`."""
    seen, caption = torch.zeros(2, pixels, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)
    return Denoiser(words, length, levels, pixels, width, layers), (seen, caption, torch.zeros(2, dtype=torch.bool))


class Wishes(Dataset[tuple[Tensor, ...]]):
    """Captions to draw. All luck of a picture is drawn here, keyed by its number: the same on any number of ranks."""

    def __init__(self, captions: Tensor, pixels: int, levels: int) -> None:
        self.captions, self.shape = captions, (pixels, levels)

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Number, caption, and the luck of drawing it."""
        return torch.tensor(index), self.captions[index], *unmasking_noise(*self.shape, sample_rng())


def draw(net: nn.Module, caption: Tensor, luck: list[Tensor], scale: float, passes: int) -> dict[str, Tensor]:
    """Pictures for captions, without and with guidance: all pixels hidden at first, some more shown in each pass."""
    plain, every = partial(net, caption=caption), torch.ones(len(caption), dtype=torch.bool, device=caption.device)

    def led(seen: Tensor) -> Tensor:
        return guided(plain(seen), plain(seen, drop=every), scale)

    return {"unguided": unmask(plain, *luck, passes), "guided": unmask(led, *luck, passes)}


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
    data: Annotated[Path | None, typer.Option(help="an .npz file; default: scikit-learn's digits")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    global_batch: Annotated[int, typer.Option(min=1, help="samples in a step, over all ranks")] = 64,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=16, help="a multiple of 16")] = 64,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    learning_rate: float = 5e-3,
    scale: Annotated[float, typer.Option(help="of guidance; 1 is none")] = 3.0,
    passes: Annotated[int, typer.Option(min=1, help="through the net for one picture")] = 32,
    draws: Annotated[int, typer.Option(min=1, help="pictures of each class to draw at the end")] = 20,
) -> None:
    """Train, then draw pictures with and without guidance and let a classifier of real images name them."""
    images, labels, captions = captioned_images(data)
    texts, pixels, levels = spell(captions), images.flatten(1), int(images.max()) + 1
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        net, _ = build(int(texts.max()) + 1, texts.shape[1], levels, pixels.shape[1], width, layers)
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
        first = [labels.tolist().index(label) for label in classes.tolist()]  # its words are those asked with
        wanted = texts[first].repeat(draws, 1)
        wishes = run.shard(Wishes(wanted, pixels.shape[1], levels), num_workers=0)
        nothing = torch.zeros(len(wanted), pixels.shape[1], dtype=torch.long, device=run.device)
        drawn = {"unguided": nothing.clone(), "guided": nothing.clone()}
        with run.evaluate(model) as net:
            for number, caption, *luck in wishes:
                for name, pictures in draw(net, caption, luck, scale, passes).items():
                    drawn[name][number] = pictures
        drawn = {name: run.all_reduce(mine, "sum").cpu() for name, mine in drawn.items()}  # each rank drew its part
        right = run.once(judge, pixels, labels, drawn, classes.repeat(draws))
        run.log({f"draws/{name}_accuracy": share for name, share in right.items()})
        for name, share in right.items():
            run.print(
                f"{name}: a classifier of the real images reads {share:.1%} of the pictures as what was asked for"
            )
        grids = {name: each.view(draws, len(classes), *images.shape[1:]) for name, each in drawn.items()}
        run.once(save, run.folder, net, grids)
        run.print(f"samples.png, weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
