"""Latent adapters: an encoder compresses a text into a few soft tokens for one or more frozen language models."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from samestep import Run
from samestep.assets import model_folder, read_texts, smollm2, tokenize
from samestep.nn import embed_tokens, losses_with_prefix, prefix_shape, transformer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class LatentEncoder(nn.Module):
    """The trainable part: encoder, refiner and gist head, and an adapter and a prefix generator per language model.

    A latent is initialized as the mean of its part of the text, which a language model partly understands.
    """

    def __init__(self, configs: list[Any], latents: int, width: int, max_length: int) -> None:
        super().__init__()
        self.latents, text_width = latents, configs[0].hidden_size
        self.shapes = [prefix_shape(config) for config in configs]
        self.input_projection = nn.Linear(text_width, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(max_length, width))
        self.encoder, self.refiner = transformer(width, 2, head=32), transformer(width, 1, head=32)
        self.pooling = nn.Linear(width, latents)
        self.adapters = nn.ModuleList(nn.Linear(text_width + width, config.hidden_size) for config in configs)
        self.prefixes = nn.ModuleList(nn.Linear(width, math.prod(shape)) for shape in self.shapes)
        self.gist = nn.Linear(width, text_width)
        for adapter, prefix in zip(self.adapters, self.prefixes, strict=True):
            nn.init.eye_(adapter.weight)
            nn.init.zeros_(prefix.weight)
            nn.init.zeros_(prefix.bias)

    def forward(self, text: Tensor, mask: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """From embedded tokens: per model, soft tokens and keys and values of each layer; and the gist of the text."""
        encoded = self.encoder(self.input_projection(text) + self.position_embedding, src_key_padding_mask=~mask)
        position = self.latents * (mask.cumsum(1) - 0.5) / mask.sum(1, keepdim=True)
        distance = position[:, None] - torch.arange(self.latents, device=position.device)[:, None] - 0.5
        scores = -12 * distance**2 + self.pooling(encoded).mT
        weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)
        refined = self.refiner(weights @ encoded)
        latents = torch.cat([weights @ text, refined], dim=-1)
        outputs = []
        for shape, adapter, prefix in zip(self.shapes, self.adapters, self.prefixes, strict=True):
            key_values = prefix(refined).unflatten(2, shape)  # row, latent, layer, key or value, head, width
            outputs.append((adapter(latents), key_values.permute(2, 3, 0, 4, 1, 5)))
        return outputs, self.gist(refined.mean(1))


def build(
    models: list[Path] | None = None, latents: int = 4, width: int = 128, length: int = 14
) -> tuple[nn.ModuleDict, tuple[Tensor, ...], Callable[..., Tensor]]:
    """The trainable part and the frozen models, an example batch and the loss, for `samestep plan`."""
    configs = [AutoConfig.from_pretrained(folder, local_files_only=True) for folder in models or [smollm2()]]
    lms = [AutoModelForCausalLM.from_config(each, dtype=each.dtype).requires_grad_(False) for each in configs]

    def loss(parts: nn.ModuleDict, batch: tuple[Tensor, ...]) -> Tensor:
        outputs, gist = parts["encoder"](*embed_tokens(lms[0], batch[0]))
        mask = torch.ones(len(gist), latents, dtype=torch.bool, device=gist.device)
        return gist.mean() + sum(
            losses_with_prefix(lm, tokens, soft_tokens, mask, key_values).mean()
            for lm, tokens, (soft_tokens, key_values) in zip(lms, batch, outputs, strict=True)
        )

    parts = {"encoder": LatentEncoder(configs, latents, width, length)}
    parts |= {f"model{number}": lm for number, lm in enumerate(lms)}
    return nn.ModuleDict(parts), tuple(torch.zeros(2, length, dtype=torch.long) for _ in lms), loss


def evaluate(net: nn.Module, lms: list[Any], test: Any) -> Iterator[dict[str, Tensor]]:
    """Losses per token, by the prefix that the model reads: the text, its latents, those of another text, nothing."""
    for *batch, other_text in test:
        (right, _), (wrong, _) = (net(*embed_tokens(lms[0], tokens)) for tokens in (batch[0], other_text))
        for number, (lm, tokens) in enumerate(zip(lms, batch, strict=True)):
            text, text_mask = embed_tokens(lm, tokens)
            mask = text_mask.new_ones(len(text_mask), right[number][0].shape[1])
            losses = {
                "full_text": losses_with_prefix(lm, tokens, text, text_mask),
                "latents": losses_with_prefix(lm, tokens, right[number][0], mask, right[number][1]),
                "latents_of_another": losses_with_prefix(lm, tokens, wrong[number][0], mask, wrong[number][1]),
                "nothing": losses_with_prefix(lm, tokens, text[:, :0], text_mask[:, :0]),
            }
            yield {f"model{number}/{name}": values[text_mask[:, 1:]] for name, values in losses.items()}


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs, checkpoints and weights; resumes from it")] = None,
    models: Annotated[
        list[Path] | None, typer.Option(metavar="<path>", help="a Hugging Face folder; repeat it for a second model")
    ] = None,
    model_layers: Annotated[int, typer.Option(min=1, max=30, help="of the default model, for quick tests")] = 30,
    placement: Annotated[str, typer.Option(help="of the frozen models: auto, gpu, cpu, ...")] = "auto",
    texts: Annotated[Path | None, typer.Option(help="one sentence per line; default: Shakespeare")] = None,
    count: Annotated[int, typer.Option(min=1, help="sentences for training")] = 720,
    held_out: Annotated[int, typer.Option(min=1, help="sentences for evaluation")] = 48,
    length: Annotated[int, typer.Option(min=2, help="maximum number of tokens per sentence")] = 14,
    latents: Annotated[int, typer.Option(min=1, help="soft tokens per sentence")] = 4,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 16,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=32, help="a multiple of 32")] = 128,
    learning_rate: float = 1e-3,
    gist_weight: float = 0.1,
) -> None:
    """Train an encoder for frozen language models; compare perplexities after the text, its latents and nothing."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folders = [model_folder(each) for each in models or [run.once(smollm2, model_layers, per="node")]]
        lines = read_texts(texts, held_out + count, longest=length // 2, least=held_out + 1)
        tokenized = [tokenize(lines, folder, length, begin=True) for folder in folders]
        columns = [tokens.where(mask > 0, -1) for tokens, mask in tokenized]
        data = TensorDataset(*columns, columns[0].roll(1, 0))  # the last column is another text, for the evaluation
        dtype = torch.float32 if run.device.type == "cpu" else None
        lms = [
            run.teacher(folder, placement=placement, dtype=dtype, example=tokens[:global_batch]).module
            for folder, (tokens, _) in zip(folders, tokenized, strict=True)
        ]
        configs = [AutoConfig.from_pretrained(folder, local_files_only=True) for folder in folders]
        model = run.wrap(LatentEncoder(configs, latents, width, length))
        # The adapters start as the identity; at the full learning rate they would forget the text.
        slow = [parameter for name, parameter in model.named_parameters() if "adapters" in name]
        fast = [parameter for name, parameter in model.named_parameters() if "adapters" not in name]
        optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow}], lr=learning_rate, eps=1e-5)
        train = run.shard(TensorDataset(*data[held_out:]), shuffle=True)
        test = run.shard(TensorDataset(*data[:held_out]))
        rates = [learning_rate, learning_rate / 10]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, epochs * train.steps_per_epoch)
        checkpoint = run.checkpoint(run.folder, model=model, optimizer=optimizer, schedule=schedule, train=train)

        for epoch in train.epochs(epochs):
            for step in epoch:
                for *batch, _ in step:
                    text, text_mask = embed_tokens(lms[0], batch[0])
                    outputs, gist = model(text, text_mask)
                    loss = gist_weight * step.mean(1 - cosine_similarity(gist, (text * text_mask[..., None]).sum(1)))
                    for lm, tokens, (soft_tokens, key_values) in zip(lms, batch, outputs, strict=True):
                        mask = text_mask.new_ones(soft_tokens.shape[:2])
                        losses = losses_with_prefix(lm, tokens, soft_tokens, mask, key_values)
                        loss = loss + step.mean(losses, mask=tokens[:, 1:] >= 0)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        with run.evaluate(model) as net:
            perplexity = {name: math.exp(value) for name, value in run.means(evaluate(net, lms, test)).items()}
            weights = {name: value.cpu() for name, value in net.state_dict().items()}
        run.once(torch.save, weights, run.folder / "weights.pt")
        run.log({f"perplexity/{name}": value for name, value in perplexity.items()}, now=True)
        mean_length = run.mean((tokens >= 0).sum(1) - 1 for tokens, *_ in test)
        ratio = mean_length / latents
        run.print(f"{mean_length:.1f} tokens per sentence, compressed to {latents} latents: {ratio:.1f} to 1")
        for name, value in perplexity.items():
            run.print(f"perplexity {name:<26} {value:10.1f}")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
