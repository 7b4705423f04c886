"""Latent adapters: frozen language models read a text through a few soft tokens, which an encoder learns to write."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from samestep import Run
from samestep.assets import model_folder, read_texts, smollm2, tokenized
from samestep.nn import embedded, losses_after, prefix_shape, transformer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Writer(nn.Module):
    """All that trains: encoder, refiner and gist head, and for every model an adapter and a generator of deep prefixes.

    A latent begins as the mean of its stretch of the text, which a language model half understands before any training.
    """

    def __init__(self, configs: list[Any], latents: int, width: int, longest: int) -> None:
        super().__init__()
        self.latents, wide, self.shapes = latents, configs[0].hidden_size, [prefix_shape(config) for config in configs]
        self.narrow, self.places = nn.Linear(wide, width), nn.Parameter(0.02 * torch.randn(longest, width))
        self.encoder, self.refiner = transformer(width, 2, head=32), transformer(width, 1, head=32)
        self.choose = nn.Linear(width, latents)
        self.adapters = nn.ModuleList(nn.Linear(wide + width, config.hidden_size) for config in configs)
        self.prefixes = nn.ModuleList(nn.Linear(width, math.prod(shape)) for shape in self.shapes)
        self.gist = nn.Linear(width, wide)
        for adapter, prefix in zip(self.adapters, self.prefixes, strict=True):
            nn.init.eye_(adapter.weight)
            nn.init.zeros_(prefix.weight)
            nn.init.zeros_(prefix.bias)

    def forward(self, text: Tensor, there: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """From embedded tokens: for every model soft tokens, keys and values in each layer; and the text's gist."""
        read = self.encoder(self.narrow(text) + self.places, src_key_padding_mask=~there)
        at = self.latents * (there.cumsum(1) - 0.5) / there.sum(1, keepdim=True)
        near = -12 * (at[:, None] - torch.arange(self.latents, device=at.device)[:, None] - 0.5) ** 2
        weights = (near + self.choose(read).mT).masked_fill(~there[:, None], -math.inf).softmax(-1)
        refined = self.refiner(weights @ read)
        latents = torch.cat([weights @ text, refined], dim=-1)
        made = []
        for shape, adapter, prefix in zip(self.shapes, self.adapters, self.prefixes, strict=True):
            deep = prefix(refined).unflatten(2, shape)
            made.append((adapter(latents), deep.permute(2, 3, 0, 4, 1, 5)))  # layer, key or value, row, head, latent
        return made, self.gist(refined.mean(1))


def build(
    models: list[Path] | None = None, latents: int = 4, width: int = 128, length: int = 14
) -> tuple[nn.ModuleDict, tuple[Tensor, ...], Callable[..., Tensor]]:
    """What trains and the frozen models behind it, an example batch and their loss, for `samestep plan`."""
    configs = [AutoConfig.from_pretrained(folder, local_files_only=True) for folder in models or [smollm2()]]
    frozen = [AutoModelForCausalLM.from_config(each, dtype=each.dtype).requires_grad_(False) for each in configs]

    def loss(parts: nn.ModuleDict, tokens: tuple[Tensor, ...]) -> Tensor:
        text, there = embedded(frozen[0], tokens[0])
        written, gist = parts["writer"](text, there)
        every, both = there.new_ones(len(there), latents), zip(frozen, tokens, written, strict=True)
        return gist.mean() + sum(losses_after(lm, words, soft, every, deep).mean() for lm, words, (soft, deep) in both)

    parts = {"writer": Writer(configs, latents, width, length)} | {f"model{at}": lm for at, lm in enumerate(frozen)}
    return nn.ModuleDict(parts), tuple(torch.zeros(2, length, dtype=torch.long) for _ in frozen), loss


def judge(net: nn.Module, lms: list[Any], test: Any) -> Iterator[dict[str, Tensor]]:
    """Losses of every token by what the model was given: the text itself, its latents, those of another, nothing."""
    for *given, other in test:
        (mine, _), (wrong, _) = (net(*embedded(lms[0], tokens)) for tokens in (given[0], other))
        for at, (lm, tokens) in enumerate(zip(lms, given, strict=True)):
            text, there = embedded(lm, tokens)
            every = there.new_ones(len(there), mine[at][0].shape[1])
            found = {
                "full_text": losses_after(lm, tokens, text, there),
                "latents": losses_after(lm, tokens, mine[at][0], every, mine[at][1]),
                "latents_of_another": losses_after(lm, tokens, wrong[at][0], every, wrong[at][1]),
                "nothing": losses_after(lm, tokens, text[:, :0], there[:, :0]),
            }
            yield {f"model{at}/{name}": losses[there[:, 1:]] for name, losses in found.items()}


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="where logs, checkpoints and weights go; again: go on")] = None,
    models: Annotated[
        list[Path] | None, typer.Option(metavar="<path>", help="Hugging Face folder; again for a second one")
    ] = None,
    model_layers: Annotated[int, typer.Option(min=1, max=30, help="of the default model: fewer are worse")] = 30,
    placement: Annotated[str, typer.Option(help="of the frozen models: gpu, cpu, ...; auto chooses")] = "auto",
    texts: Annotated[Path | None, typer.Option(help="one sentence a line; default: Shakespeare's")] = None,
    count: Annotated[int, typer.Option(min=1, help="sentences to learn from")] = 720,
    held_out: Annotated[int, typer.Option(min=1, help="sentences to be judged by")] = 48,
    length: Annotated[int, typer.Option(min=2, help="tokens of a sentence, at most")] = 14,
    latents: Annotated[int, typer.Option(min=1, help="soft tokens that stand for a sentence")] = 4,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    global_batch: Annotated[int, typer.Option(min=1, help="samples in a step, over all ranks")] = 16,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=32, help="a multiple of 32")] = 128,
    learning_rate: float = 1e-3,
    gist_weight: float = 0.1,
) -> None:
    """Train what stands around frozen language models, then compare perplexities: with text, latents, nothing."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folders = [model_folder(each) for each in models or [run.once(smollm2, model_layers, per="node")]]
        lines = read_texts(texts, held_out + count, longest=length // 2, least=held_out + 1)
        read = [tokenized(lines, folder, length, begin=True) for folder in folders]
        columns = [tokens.where(there > 0, -1) for tokens, there in read]
        data = TensorDataset(*columns, columns[0].roll(1, 0))  # and another text, for the first model
        dtype = torch.float32 if run.device.type == "cpu" else None
        place = partial(run.teacher, placement=placement, dtype=dtype)
        frozen = [place(at, example=some[:global_batch]).module for at, (some, _) in zip(folders, read, strict=True)]
        configs = [AutoConfig.from_pretrained(folder, local_files_only=True) for folder in folders]
        model = run.wrap(Writer(configs, latents, width, length))
        # Adapters begin as what is right for the text itself: faster, they would forget it before they learn more.
        slow = [part for name, part in model.named_parameters() if "adapters" in name]
        fast = [part for name, part in model.named_parameters() if "adapters" not in name]
        optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow}], lr=learning_rate, eps=1e-5)
        train = run.shard(TensorDataset(*data[held_out:]), shuffle=True)
        test = run.shard(TensorDataset(*data[:held_out]))
        rates = [learning_rate, learning_rate / 10]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, epochs * train.steps_per_epoch)
        checkpoint = run.checkpoint(run.folder, model=model, optimizer=optimizer, schedule=schedule, train=train)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for *tokens, _ in step:
                    text, there = embedded(frozen[0], tokens[0])
                    written, gist = model(text, there)
                    loss = gist_weight * step.mean(1 - cosine_similarity(gist, (text * there[..., None]).sum(1)))
                    for lm, words, (soft, deep) in zip(frozen, tokens, written, strict=True):
                        every = there.new_ones(soft.shape[:2])
                        loss = loss + step.mean(losses_after(lm, words, soft, every, deep), mask=words[:, 1:] >= 0)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        with run.evaluate(model) as net:
            told = {name: math.exp(value) for name, value in run.means(judge(net, frozen, test)).items()}
            weights = {name: value.cpu() for name, value in net.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")
        run.log({f"perplexity/{name}": value for name, value in told.items()}, now=True)
        each = run.mean((tokens >= 0).sum(1) - 1 for tokens, *_ in test)
        run.print(f"{each:.1f} tokens of a sentence became {latents} latents: {each / latents:.1f} to 1")
        for name, value in told.items():
            run.print(f"perplexity {name:<26} {value:10.1f}")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
