"""Text to image by discrete diffusion with classifier-free guidance: captions become images of digits."""

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


def tokenize(captions: list[str]) -> Tensor:
    """Captions as word indices from 1, padded with 0."""
    rows = [text.split() for text in captions]
    index = {word: number for number, word in enumerate(sorted({word for row in rows for word in row}), start=1)}
    length = max(map(len, rows))
    return torch.tensor([[index[word] for word in row] + [0] * (length - len(row)) for row in rows])


class Denoiser(nn.Module):
    """Predicts masked pixels from the visible ones and from a caption, which a trainable text encoder reads."""

    def __init__(self, words: int, length: int, levels: int, pixels: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(words, width), nn.Embedding(levels + 1, width)
        self.word_position_embedding = nn.Parameter(torch.randn(length, width))
        self.pixel_position_embedding = nn.Parameter(torch.randn(pixels, width))
        self.text_encoder, self.body = transformer(width, 1, head=16), transformer(width, layers, head=16)
        self.dropout = ConditioningDropout(0.1, null="learned", shape=(width,))
        self.head = nn.Linear(width, levels)

    def forward(self, image: Tensor, caption: Tensor, drop: Tensor | None = None) -> Tensor:
        """Scores of all gray levels for every pixel; rows in `drop` are predicted without their caption."""
        text = self.text_encoder(self.words(caption) + self.word_position_embedding).mean(dim=1)
        x = self.pixels(image) + self.pixel_position_embedding + self.dropout(text, drop)[:, None]
        return self.head(self.body(x))


def build(
    words: int = 14, length: int = 3, levels: int = 17, pixels: int = 64, width: int = 64, layers: int = 3
) -> tuple[Denoiser, tuple[Tensor, ...]]:
    """The model and an example batch, for `samestep plan`."""
    image, caption = torch.zeros(2, pixels, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)
    return Denoiser(words, length, levels, pixels, width, layers), (image, caption, torch.zeros(2, dtype=torch.bool))


class Prompts(Dataset[tuple[Tensor, ...]]):
    """Captions to generate images for. The noise of an image is keyed by its index, not by the rank."""

    def __init__(self, captions: Tensor, pixels: int, levels: int) -> None:
        self.captions, self.shape = captions, (pixels, levels)

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Index, caption, and the noise for sampling."""
        return torch.tensor(index), self.captions[index], *unmasking_noise(*self.shape, sample_rng())


def generate(model: nn.Module, caption: Tensor, noise: list[Tensor], scale: float, passes: int) -> dict[str, Tensor]:
    """Images for captions, without and with guidance: all pixels start masked, and each pass reveals some."""
    predict = partial(model, caption=caption)
    drop_all = torch.ones(len(caption), dtype=torch.bool, device=caption.device)

    def predict_guided(image: Tensor) -> Tensor:
        return guided(predict(image), predict(image, drop=drop_all), scale)

    return {"unguided": unmask(predict, *noise, passes), "guided": unmask(predict_guided, *noise, passes)}


def evaluate(pixels: Tensor, labels: Tensor, images: dict[str, Tensor], targets: Tensor) -> dict[str, float]:
    """The fraction of generated images that a classifier of the real images recognizes as their prompt."""
    classifier = SVC(gamma="scale").fit(pixels.numpy(), labels.numpy())
    return {name: float((classifier.predict(each.numpy()) == targets.numpy()).mean()) for name, each in images.items()}


def save(folder: Path, model: nn.Module, images: dict[str, Tensor]) -> None:
    """Write the weights and a grid of images: one column per class, unguided ones left, guided ones right."""
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / "weights.pt")
    framed = torch.cat([pad(each[:6], (1, 1, 1, 1, 0, 1)) for each in images.values()], dim=1)
    grid = framed.transpose(1, 2).flatten(2).flatten(0, 1)
    imsave(folder / "samples.png", grid.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy(), cmap="gray_r")


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs, weights and images")] = None,
    data: Annotated[Path | None, typer.Option(help="an .npz file; default: scikit-learn's digits")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 64,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=16, help="a multiple of 16")] = 64,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    learning_rate: float = 5e-3,
    scale: Annotated[float, typer.Option(help="guidance scale; 1 disables guidance")] = 3.0,
    passes: Annotated[int, typer.Option(min=1, help="forward passes per generated image")] = 32,
    samples: Annotated[int, typer.Option(min=1, help="images to generate per class")] = 20,
) -> None:
    """Train, generate images with and without guidance, and classify them with a classifier of real images."""
    images, labels, captions = captioned_images(data)
    texts, pixels, levels = tokenize(captions), images.flatten(1), int(images.max()) + 1
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        denoiser, _ = build(int(texts.max()) + 1, texts.shape[1], levels, pixels.shape[1], width, layers)
        model = run.wrap(denoiser)
        # A larger eps than Adam's default: a gradient of rounding errors only must not become a full step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=1e-5)
        train = run.shard(TensorDataset(pixels, texts), shuffle=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for image, caption in step:
                    mask = step.random(image.shape[1]) < step.random(1)  # a different fraction per sample, 0 to 1
                    scores = model(image.masked_fill(mask, levels), caption)
                    losses = cross_entropy(scores.transpose(1, 2), image, reduction="none")
                    step.mean(losses, mask=mask).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        classes = labels.unique()
        first = [labels.tolist().index(label) for label in classes.tolist()]  # one caption per class
        prompts = texts[first].repeat(samples, 1)
        prompt_shard = run.shard(Prompts(prompts, pixels.shape[1], levels), num_workers=0)
        empty = torch.zeros(len(prompts), pixels.shape[1], dtype=torch.long, device=run.device)
        generated = {"unguided": empty.clone(), "guided": empty.clone()}
        with run.evaluate(model) as net:
            for index, caption, *noise in prompt_shard:
                for name, batch in generate(net, caption, noise, scale, passes).items():
                    generated[name][index] = batch
        generated = {name: run.all_reduce(mine, "sum").cpu() for name, mine in generated.items()}  # of all ranks
        accuracy = run.once(evaluate, pixels, labels, generated, classes.repeat(samples))
        run.log({f"samples/{name}_accuracy": value for name, value in accuracy.items()})
        for name, value in accuracy.items():
            run.print(f"{name}: a classifier of the real images recognizes {value:.1%} of the generated images")
        grids = {name: each.view(samples, len(classes), *images.shape[1:]) for name, each in generated.items()}
        run.once(save, run.folder, net, grids)
        run.print(f"samples.png, weights and logs: {run.folder}")


if __name__ == "__main__":
    app()
