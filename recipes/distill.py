"""Distillation: a small student learns from a large frozen teacher, which stands wherever it fits best."""

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
from samestep.assets import model_folder, read_texts, tokenized
from samestep.assets import pretrained as minilm
from samestep.assets import pretrained as smollm2
from samestep.nn import distill_loss, match_features, next_token_losses, similarity_correlation
from samestep.teacher import Student, Timed, mean_pool

Mode = Literal["features", "logits"]
# By mode: the default teacher, layers of the student, sentences to learn from and to be judged by. Two minutes each.
USUAL = {"features": (minilm, 2, 16_000, 400), "logits": (smollm2, 4, 1200, 100)}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def taught(mode: Mode, given: Any, mask: Tensor) -> Any:
    """Of what the teacher gives, what is learnt: logits, or one vector for each sentence."""
    return given["logits"] if mode == "logits" else mean_pool(given["last_hidden_state"], mask)


def distances(mode: Mode, mine: Tensor, theirs: Any, temperature: float = 2.0) -> Tensor:
    """How far the student is from its teacher, for each token or for each sentence."""
    return distill_loss(mine, theirs, temperature) if mode == "logits" else match_features(mine, theirs, by="cosine")


def build(
    teacher: Path | None = None, mode: Mode = "features", layers: int | None = None, length: int = 20
) -> tuple[nn.ModuleDict, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Student and teacher, an example batch and what is learnt from both, for `samestep plan`."""
    usual, few, *_ = USUAL[mode]
    folder, kind = teacher or usual(), AutoModelForCausalLM if mode == "logits" else AutoModel
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    frozen = kind.from_config(config, dtype=config.dtype).requires_grad_(False)
    both = nn.ModuleDict({"student": Student(folder, learns=mode, layers=layers or few), "teacher": frozen})

    def loss(both: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            given = taught(mode, both["teacher"](*batch), batch[1])
        return distances(mode, both["student"](*batch), given)

    tokens = torch.zeros(2, length, dtype=torch.long)
    return both, (tokens, torch.ones_like(tokens)), loss


def judge_vectors(run: Run, both: list[Timed], test: Any, count: int, width: int) -> dict[str, float]:
    """The cosine to the teacher's vectors, and Pearson's r of similarities with the teacher's over all pairs."""
    made = torch.zeros(2, count, width, device=run.device)

    def differences() -> Iterator[Tensor]:
        for tokens, mask, number in test:
            made[:, number] = torch.stack([function(tokens, mask) for function in both])
            yield distances("features", *made[:, number])

    cosine = 1 - run.mean(differences())
    whole = run.all_reduce(made, "sum").cpu()  # each rank made its part of them
    return {"correlation": similarity_correlation(*whole), "cosine": cosine}


def judge_words(run: Run, both: list[Timed], test: Any, temperature: float) -> dict[str, float]:
    """The divergence from the teacher and both perplexities, over every token of the held-out sentences."""

    def losses() -> Iterator[dict[str, Tensor]]:
        for tokens, mask, _ in test:
            mine, theirs = (function(tokens, mask) for function in both)
            known = {"perplexity": mine, "teacher_perplexity": theirs}
            if not isinstance(theirs, Tensor):
                del known["teacher_perplexity"]  # top-k logits do not tell it
            told = {name: next_token_losses(each, tokens)[mask[:, 1:].bool()] for name, each in known.items()}
            yield {"divergence": distances("logits", mine, theirs, temperature)[mask.bool()]} | told

    found = run.means(losses())
    return {name: value if name == "divergence" else math.exp(value) for name, value in found.items()}


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="where logs, checkpoints and weights go; again: go on")] = None,
    mode: Annotated[Mode, typer.Option(help="learn vectors, or next words")] = "features",
    teacher: Annotated[Path | None, typer.Option(help="a Hugging Face folder; default: MiniLM, or SmolLM2")] = None,
    teacher_placement: Annotated[str, typer.Option(help="cpu, gpu, served, cached, ...")] = "auto",
    teacher_dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="keep so many logits of each word, and their sum")] = None,
    texts: Annotated[Path | None, typer.Option(help="one sentence a line; default: Shakespeare's")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="sentences to learn from; default: by mode")] = None,
    held_out: Annotated[int | None, typer.Option(min=3, help="sentences to be judged by; default: by mode")] = None,
    length: Annotated[int, typer.Option(min=2, help="tokens of a sentence, at most")] = 20,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    global_batch: Annotated[int, typer.Option(min=1, help="samples in a step, over all ranks")] = 32,
    seed: int = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="of the student; default: by mode")] = None,
    width: Annotated[int | None, typer.Option(min=32, help="of a student from nothing; default: as wide")] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="recompute the student's layers in backward")] = False,
    temperature: float = 2.0,
    learning_rate: float = 1e-3,
) -> None:
    """Train the student, then say how much of the teacher it kept, how much faster it is, and what the teacher took."""
    causal, (usual, few, most, tested) = mode == "logits", USUAL[mode]
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folder = run.once(usual, per="node") if teacher is None else model_folder(teacher)
        held_out = held_out or tested
        lines = read_texts(texts, held_out + (count or most), least=held_out + 1)
        data = TensorDataset(*tokenized(lines, folder, length), torch.arange(len(lines)))
        learnt, judged = TensorDataset(*data[held_out:]), TensorDataset(*data[:held_out])
        by_device = torch.float32 if run.device.type == "cpu" else None  # a GPU takes what the file holds
        dtype = getattr(torch, teacher_dtype) if teacher_dtype else by_device
        some = data[:global_batch][:2]
        tutor = run.teacher(
            folder, placement=teacher_placement, dtype=dtype, top_k=top_k, temperature=temperature, example=some
        )

        def ask(tokens: Tensor, mask: Tensor) -> Any:
            return taught(mode, tutor(tokens, mask), mask)

        student = Student(folder, learns=mode, layers=layers or few, width=width)
        model = run.wrap(student, activation_checkpointing=student.blocks() if gradient_checkpointing else ())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, eps=1e-5)
        train, test = run.shard(learnt, shuffle=True), run.shard(judged)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * train.steps_per_epoch)

        def judge() -> tuple[dict[str, float], dict[str, Tensor]]:
            with run.evaluate(model) as net:
                both = [Timed(net), Timed(ask)]
                if causal:
                    found = judge_words(run, both, test, temperature)
                else:
                    found = judge_vectors(run, both, test, len(judged), student.teacher_width)
                times = run.all_reduce(torch.tensor([each.seconds for each in both], device=run.device), "sum")
            return found | {"speedup": float(times[1] / times[0])}, net.state_dict()

        untrained, _ = judge()
        checkpoint = run.checkpoint(run.folder, model=model, optimizer=optimizer, schedule=schedule, train=train)
        for epoch in train.epochs(epochs):
            for step in epoch:
                for tokens, mask, _ in step:
                    given = ask(tokens, mask)
                    losses = distances(mode, model(tokens, mask), given, temperature)
                    step.mean(losses, mask=mask.bool() if causal else None).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        trained, weights = judge()
        for name, value in trained.items():
            run.log({f"student/{name}": value, f"untrained/{name}": untrained[name]})
            run.print(f"student: {name} {value:.3f}, untrained {untrained[name]:.3f}")
        run.print(f"teacher: {tutor.describe()}")
        run.once(torch.save, {name: value.cpu() for name, value in weights.items()}, run.folder / "weights.pt")
        run.print(f"weights, checkpoints and logs: {run.folder}")


if __name__ == "__main__":
    app()
