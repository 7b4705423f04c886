"""Distillation: a small student learns from a large frozen teacher, which stands wherever it fits best."""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from samestep import Run
from samestep.assets import minilm, sentences, smollm2
from samestep.errors import DataError
from samestep.nn import Projection, distill_loss, match_features

# By mode: the default teacher, layers of the student, sentences to learn from and to be judged by. Two minutes each.
USUAL = {"features": (minilm, 2, 16_000, 400), "logits": (smollm2, 4, 1200, 100)}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def read(texts: Path | None, folder: Path, count: int, length: int) -> TensorDataset:
    """Tokens of `count` sentences (n, length), which of them are there, and numbers: of a file, or Shakespeare's."""
    if texts is not None and not texts.is_file():
        raise DataError(f"{texts} does not exist: --texts expects a text file with one sentence a line")
    lines = sentences() if texts is None else [line for line in texts.read_text().splitlines() if line.strip()]
    lines = lines[:: max(1, len(lines) // count)][:count]  # from all over, not the first play alone
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    made = tokenizer(lines, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return TensorDataset(made["input_ids"], made["attention_mask"], torch.arange(len(lines)))


class Student(nn.Module):
    """The teacher's architecture with fewer layers: as wide and begun from its file, or narrower and from nothing."""

    def __init__(self, folder: Path, causal: bool, width: int | None, layers: int) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.teacher_width, deep = config.hidden_size, config.num_hidden_layers
        config.update({"num_hidden_layers": layers, "use_cache": False})
        config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        if width is not None:
            heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32, "head_dim": 32}
            config.update({"hidden_size": width, "intermediate_size": 4 * width} | heads)
        kind = AutoModelForCausalLM if causal else AutoModel
        more = {} if causal else {"add_pooling_layer": False}
        self.body: Any = kind.from_config(config, dtype=torch.float32, **more)
        # Built from two numbers of configurations on every rank, never from a live teacher, which not all hold.
        self.widen = nn.Identity() if width is None or causal else Projection(width, self.teacher_width)
        if width is None:
            self._inherit(folder, [round(i * (deep - 1) / max(1, layers - 1)) for i in range(layers)])

    def _inherit(self, folder: Path, chosen: list[int]) -> None:
        """Begin with layers from all over the teacher's depth, and keep its words: few of them come up in training."""
        with safe_open(folder / "model.safetensors", "pt") as weights, torch.no_grad():
            for name, parameter in self.body.named_parameters():
                theirs = re.sub(r"(layers?\.)(\d+)", lambda found: f"{found[1]}{chosen[int(found[2])]}", name)
                parameter.copy_(weights.get_tensor(theirs))
        self.body.get_input_embeddings().requires_grad_(False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Vectors of sentences (rows, the teacher's width), or logits of next words (rows, tokens, words)."""
        given = self.body(input_ids=tokens, attention_mask=mask)
        return given.logits if "logits" in given else self.widen(pooled(given.last_hidden_state, mask))


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """One vector a sentence: the mean over its tokens."""
    return (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Timed:
    """A function that knows how long it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *batch: Tensor) -> Any:
        """What the function gives, once it is there."""
        began = time.perf_counter()
        given = self.function(*batch)
        if batch[0].is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        return given


def judge_vectors(run: Run, both: list[Timed], test: Any, count: int, width: int) -> dict[str, float]:
    """The cosine to the teacher's vectors, and Pearson's r of similarities with the teacher's over all pairs."""
    made = torch.zeros(2, count, width, device=run.device)

    def distances() -> Iterator[Tensor]:
        for tokens, mask, number in test:
            mine, theirs = (function(tokens, mask) for function in both)
            made[:, number] = torch.stack([mine, theirs])
            yield match_features(mine, theirs, by="cosine")

    cosine = 1 - run.mean(distances())
    whole = normalize(run.all_reduce(made, "sum").cpu().double(), dim=-1)  # each rank made its part of them
    alike = (whole @ whole.mT)[:, *torch.triu_indices(count, count, 1)]  # every pair once, and none with itself
    return {"correlation": torch.corrcoef(alike)[0, 1].item(), "cosine": cosine}


def judge_words(run: Run, both: list[Timed], test: Any, temperature: float) -> dict[str, float]:
    """The divergence from the teacher and both perplexities, over every token of the held-out sentences."""

    def surprise(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        return losses[mask[:, 1:].flatten().bool()]

    def losses() -> Iterator[dict[str, Tensor]]:
        for tokens, mask, _ in test:
            mine, theirs = (function(tokens, mask) for function in both)
            known = {"perplexity": mine} | ({"teacher_perplexity": theirs} if isinstance(theirs, Tensor) else {})
            told = {name: surprise(logits, tokens, mask) for name, logits in known.items()}  # top-k logits tell none
            yield {"divergence": distill_loss(mine, theirs, temperature)[mask.bool()]} | told

    found = run.means(losses())
    return {name: value if name == "divergence" else math.exp(value) for name, value in found.items()}


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="where logs, checkpoints and weights go; again: go on")] = None,
    mode: Annotated[Literal["features", "logits"], typer.Option(help="learn vectors, or next words")] = "features",
    teacher: Annotated[Path | None, typer.Option(help="a Hugging Face folder; default: MiniLM, or SmolLM2")] = None,
    teacher_placement: Annotated[str, typer.Option(help="cpu, gpu, served, cached, ...")] = "auto",
    teacher_dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(help="logits that are sent or kept, for served and cached")] = None,
    texts: Annotated[Path | None, typer.Option(help="one sentence a line; default: Shakespeare's")] = None,
    count: Annotated[int | None, typer.Option(help="sentences to learn from; default: by mode")] = None,
    held_out: Annotated[int | None, typer.Option(help="sentences to be judged by; default: by mode")] = None,
    length: Annotated[int, typer.Option(help="tokens of a sentence, at most")] = 20,
    epochs: int = 1,
    global_batch: Annotated[int, typer.Option(help="samples in a step, over all ranks")] = 32,
    seed: int = 0,
    layers: Annotated[int | None, typer.Option(help="of the student; default: by mode")] = None,
    width: Annotated[int | None, typer.Option(help="of a student from nothing; default: the teacher's")] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="recompute the student's layers in backward")] = False,
    temperature: float = 2.0,
    learning_rate: float = 1e-3,
) -> None:
    """Train the student, then say how much of the teacher it kept, how much faster it is, and what the teacher took."""
    causal, (usual, few, most, tested) = mode == "logits", USUAL[mode]
    with Run(global_batch=global_batch, seed=seed, folder=out) as run:
        folder = teacher or run.once(usual, per="node")
        held_out = held_out or tested
        data = read(texts, folder, held_out + (count or most), length)
        learnt, judged = TensorDataset(*data[held_out:]), TensorDataset(*data[:held_out])
        dtype = teacher_dtype or ("float32" if run.device.type == "cpu" else None)  # a GPU takes what the file holds
        tutor = run.teacher(
            folder,
            placement=None if teacher_placement == "auto" else teacher_placement,
            dtype=None if dtype is None else getattr(torch, dtype),
            top_k=top_k,
            temperature=temperature,
        )

        def ask(tokens: Tensor, mask: Tensor) -> Any:
            given = tutor(input_ids=tokens, attention_mask=mask)
            return given["logits"] if causal else pooled(given["last_hidden_state"], mask)

        student = Student(folder, causal, width, layers or few)
        stacks = [part for part in student.modules() if isinstance(part, nn.ModuleList)]
        model = run.wrap(student, checkpoint=(type(stacks[0][0]),) if gradient_checkpointing else ())
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
        checkpoint = run.restore(run.folder, model=model, optimizer=optimizer, schedule=schedule, train=train)
        for epoch in train.epochs(epochs):
            for step in epoch:
                for tokens, mask, _ in step:
                    given, mine = ask(tokens, mask), model(tokens, mask)
                    if causal:
                        step.mean(distill_loss(mine, given, temperature), mask=mask.bool()).backward()
                    else:
                        step.mean(match_features(mine, given, by="cosine")).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            checkpoint.save()

        trained, weights = judge()
        for name, value in trained.items():
            run.log({f"student/{name}": value, f"untrained/{name}": untrained[name]})
            run.say(f"student: {name} {value:.3f}, untrained {untrained[name]:.3f}")
        run.say(f"teacher: {tutor.describe()}")
        run.once(torch.save, {name: value.cpu() for name, value in weights.items()}, run.folder / "weights.pt")


if __name__ == "__main__":
    app()
