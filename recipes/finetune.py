"""Finetuning: LoRA adapters for a frozen language model, on your text; checkpoints hold the adapters only."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from samestep import Run
from samestep.assets import model_folder, read_texts, smollm2, tokenize
from samestep.nn import next_token_losses

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def add_adapters(lm: Any, rank: int, dropout: float) -> PeftModel:
    """The frozen language model with a trainable adapter of this rank beside each linear layer but the head."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules="all-linear"
    )
    return get_peft_model(lm, config)


def losses_per_token(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all tokens but the first, (rows, length - 1), and which of them are not padding."""
    mask = tokens >= 0
    logits = model(input_ids=tokens.clamp(min=0), attention_mask=mask.long()).logits
    return next_token_losses(logits, tokens), mask[:, 1:]


def build(
    model: Path | None = None, rank: int = 8, dropout: float = 0.05, length: int = 20
) -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    """The model with its adapters, an example batch and the loss, for `samestep plan`."""
    config = AutoConfig.from_pretrained(model or smollm2(), local_files_only=True)
    lm = AutoModelForCausalLM.from_config(config, dtype=config.dtype)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return losses_per_token(model, tokens)[0].mean()

    return add_adapters(lm, rank, dropout), torch.zeros(2, length, dtype=torch.long), loss


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs, checkpoints and weights; resumes from it")] = None,
    model: Annotated[Path | None, typer.Option(help="a Hugging Face folder; default: SmolLM2")] = None,
    model_layers: Annotated[int, typer.Option(min=1, max=30, help="of the default model, for quick tests")] = 30,
    texts: Annotated[Path | None, typer.Option(help="one text per line; default: sentences of Shakespeare")] = None,
    count: Annotated[int, typer.Option(min=1, help="texts for training")] = 320,
    held_out: Annotated[int, typer.Option(min=1, help="texts for evaluation")] = 48,
    length: Annotated[int, typer.Option(min=2, help="maximum number of tokens per text")] = 20,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 16,
    seed: int = 0,
    rank: Annotated[int, typer.Option(min=1, help="of the adapters")] = 8,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="before the adapters")] = 0.05,
    strategy: Annotated[Literal["ddp", "fsdp", "zero2", "hybrid"] | None, typer.Option()] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="recompute activations")] = False,
    learning_rate: float = 1e-3,
) -> None:
    """Train the adapters; report the perplexity of held-out texts before and after."""
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folder = model_folder(model or run.once(smollm2, model_layers, per="node"))
        lines = read_texts(texts, held_out + count, longest=length // 2, least=held_out + 1)
        tokens, mask = tokenize(lines, folder, length, begin=True)
        data = tokens.where(mask > 0, -1)
        dtype = torch.float32 if run.device.type == "cpu" else "auto"
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        adapted = run.wrap(
            add_adapters(lm, rank, dropout),
            strategy,
            activation_checkpointing=(GradientCheckpointingLayer,) if gradient_checkpointing else (),
        )
        trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=learning_rate, eps=1e-5)
        train = run.shard(TensorDataset(data[held_out:]), shuffle=True)
        test = run.shard(TensorDataset(data[:held_out]))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        def perplexity() -> float:
            with run.evaluate(adapted) as net:
                pairs = (losses_per_token(net, rows) for (rows,) in test)
                # one value per text: with FSDP a rank without a text evaluates a row of padding, which run.means drops
                means = run.means(
                    {"loss": losses.where(counted, 0).sum(1), "tokens": counted.sum(1)} for losses, counted in pairs
                )
                return math.exp(means["loss"] / means["tokens"])

        untrained = perplexity()
        checkpoint = run.checkpoint(
            run.folder, trainable_only=True, model=adapted, optimizer=optimizer, schedule=schedule, train=train
        )
        for epoch in train.epochs(epochs):
            for step in epoch:
                for (rows,) in step:
                    losses, counted = losses_per_token(adapted, rows)
                    step.mean(losses, mask=counted).backward()
                nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        trained = perplexity()
        run.save_pretrained(adapted, run.folder / "adapter", tokenizer=folder)
        run.log({"perplexity/untrained": untrained, "perplexity/trained": trained}, now=True)
        run.print(f"perplexity of {held_out} held-out texts: {untrained:.1f} before, {trained:.1f} after")
        run.print(f"whole weights: samestep checkpoint export {run.folder} --merge --to merged")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
