"""Distillation: a small student learns from a large frozen teacher, which can be placed where it fits best."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from samestep import Run
from samestep.assets import minilm, model_folder, read_texts, smollm2, tokenize
from samestep.nn import distill_loss, match_features, next_token_losses, similarity_correlation
from samestep.teacher import Student, Timed, mean_pool

Mode = Literal["features", "logits"]
# By mode: the default teacher, layers of the student, sentences for training and for evaluation.
DEFAULTS = {"features": (minilm, 2, 16_000, 400), "logits": (smollm2, 4, 1200, 100)}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def select_targets(mode: Mode, output: Any, mask: Tensor) -> Any:
    """The part of the teacher's output that the student learns: logits, or one vector per sentence."""
    return output["logits"] if mode == "logits" else mean_pool(output["last_hidden_state"], mask)


def compute_losses(mode: Mode, student: Tensor, teacher: Any, temperature: float = 2.0) -> Tensor:
    """The distance between student and teacher, per token or per sentence."""
    if mode == "logits":
        return distill_loss(student, teacher, temperature)
    return match_features(student, teacher, by="cosine")


def build(
    teacher: Path | None = None, mode: Mode = "features", layers: int | None = None, length: int = 20
) -> tuple[nn.ModuleDict, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Student and teacher, an example batch and the loss, for `samestep plan`."""
    default_teacher, default_layers, *_ = DEFAULTS[mode]
    folder, kind = teacher or default_teacher(), AutoModelForCausalLM if mode == "logits" else AutoModel
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    frozen = kind.from_config(config, dtype=config.dtype).requires_grad_(False)
    models = nn.ModuleDict(
        {"student": Student(folder, learns=mode, layers=layers or default_layers), "teacher": frozen}
    )

    def loss(models: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            targets = select_targets(mode, models["teacher"](*batch), batch[1])
        return compute_losses(mode, models["student"](*batch), targets)

    tokens = torch.zeros(2, length, dtype=torch.long)
    return models, (tokens, torch.ones_like(tokens)), loss


def evaluate_features(run: Run, models: list[Timed], test: Any, count: int, width: int) -> dict[str, float]:
    """The cosine similarity to the teacher's vectors, and the correlation of all pairwise similarities."""
    vectors = torch.zeros(2, count, width, device=run.device)

    def losses() -> Iterator[Tensor]:
        for tokens, mask, index in test:
            vectors[:, index] = torch.stack([model(tokens, mask) for model in models])
            yield compute_losses("features", *vectors[:, index])

    cosine = 1 - run.mean(losses())
    all_vectors = run.all_reduce(vectors, "sum").cpu()  # each rank has computed its own rows
    return {"correlation": similarity_correlation(*all_vectors), "cosine": cosine}


def evaluate_logits(run: Run, models: list[Timed], test: Any, temperature: float) -> dict[str, float]:
    """The divergence from the teacher and both perplexities, over every token of the held-out sentences."""

    def losses() -> Iterator[dict[str, Tensor]]:
        for tokens, mask, _ in test:
            student, teacher = (model(tokens, mask) for model in models)
            logits = {"perplexity": student}
            if isinstance(teacher, Tensor):  # top-k logits have no perplexity
                logits["teacher_perplexity"] = teacher
            found = {name: next_token_losses(each, tokens)[mask[:, 1:].bool()] for name, each in logits.items()}
            yield {"divergence": compute_losses("logits", student, teacher, temperature)[mask.bool()]} | found

    means = run.means(losses())
    return {name: value if name == "divergence" else math.exp(value) for name, value in means.items()}


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="folder for logs, checkpoints and weights; resumes from it")] = None,
    mode: Annotated[Mode, typer.Option(help="learn sentence vectors, or next-token logits")] = "features",
    teacher: Annotated[Path | None, typer.Option(help="a Hugging Face folder; default: MiniLM, or SmolLM2")] = None,
    teacher_placement: Annotated[str, typer.Option(help="cpu, gpu, served, cached, ...")] = "auto",
    teacher_dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="use only the k largest logits per token")] = None,
    texts: Annotated[Path | None, typer.Option(help="one sentence per line; default: Shakespeare")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="sentences for training; default: by mode")] = None,
    held_out: Annotated[int | None, typer.Option(min=3, help="sentences for evaluation; default: by mode")] = None,
    length: Annotated[int, typer.Option(min=2, help="maximum number of tokens per sentence")] = 20,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    global_batch: Annotated[int, typer.Option(min=1, help="samples per step, over all ranks")] = 32,
    seed: int = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="of the student; default: by mode")] = None,
    width: Annotated[
        int | None, typer.Option(min=32, help="of a student with random weights; default: the teacher's")
    ] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="recompute the student's activations")] = False,
    temperature: float = 2.0,
    learning_rate: float = 1e-3,
) -> None:
    """Train the student; report its agreement with the teacher, its speedup, and the memory of the teacher."""
    default_teacher, default_layers, default_count, default_held_out = DEFAULTS[mode]
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folder = run.once(default_teacher, per="node") if teacher is None else model_folder(teacher)
        held_out = held_out or default_held_out
        lines = read_texts(texts, held_out + (count or default_count), least=held_out + 1)
        data = TensorDataset(*tokenize(lines, folder, length), torch.arange(len(lines)))
        train_set, test_set = TensorDataset(*data[held_out:]), TensorDataset(*data[:held_out])
        default_dtype = torch.float32 if run.device.type == "cpu" else None  # None: the dtype of the file
        dtype = getattr(torch, teacher_dtype) if teacher_dtype else default_dtype
        example = data[:global_batch][:2]
        frozen = run.teacher(
            folder, placement=teacher_placement, dtype=dtype, top_k=top_k, temperature=temperature, example=example
        )

        def compute_targets(tokens: Tensor, mask: Tensor) -> Any:
            return select_targets(mode, frozen(tokens, mask), mask)

        student = Student(folder, learns=mode, layers=layers or default_layers, width=width)
        model = run.wrap(student, activation_checkpointing=student.blocks() if gradient_checkpointing else ())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, eps=1e-5)
        train, test = run.shard(train_set, shuffle=True), run.shard(test_set)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        def evaluate() -> tuple[dict[str, float], dict[str, Tensor]]:
            with run.evaluate(model) as net:
                models = [Timed(net), Timed(compute_targets)]
                if mode == "logits":
                    metrics = evaluate_logits(run, models, test, temperature)
                else:
                    metrics = evaluate_features(run, models, test, len(test_set), student.teacher_width)
                seconds = run.all_reduce(torch.tensor([each.seconds for each in models], device=run.device), "sum")
            return metrics | {"speedup": float(seconds[1] / seconds[0])}, net.state_dict()

        untrained, _ = evaluate()
        checkpoint = run.checkpoint(run.folder, model=model, optimizer=optimizer, schedule=schedule, train=train)
        for epoch in train.epochs(epochs):
            for step in epoch:
                for tokens, mask, _ in step:
                    targets = compute_targets(tokens, mask)
                    losses = compute_losses(mode, model(tokens, mask), targets, temperature)
                    step.mean(losses, mask=mask.bool() if mode == "logits" else None).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        trained, weights = evaluate()
        for name, value in trained.items():
            run.log({f"student/{name}": value, f"untrained/{name}": untrained[name]})
            run.print(f"student: {name} {value:.3f}, untrained {untrained[name]:.3f}")
        run.print(f"teacher: {frozen.describe()}")
        run.once(torch.save, {name: value.cpu() for name, value in weights.items()}, run.folder / "weights.pt")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
