"""The loss of a language model: time per step and peak memory with all logits and with `linear_cross_entropy`.

    python benchmarks/language_model_loss.py [--device cuda] [--compile] [--rounds 10] [--chunk 1280] [--json]

It trains GPT-2 small (the model of overhead.py) on 32 x 1024 random tokens per step in bf16, on one GPU. With
`--device cpu` it trains a small model in fp32 without a measure of memory, to try the script. Contenders:

    outside    the model returns logits, the script computes cross_entropy
    forward    the model returns the losses, cross_entropy(head(x)) in its forward
    chunked    the model returns the losses, linear_cross_entropy(x, head.weight) in its forward

All train in one process and one run, in blocks of steps that take turns, in a different order each round. Times are
medians over the rounds, ratios are computed per round against `outside`, and the first round, which compiles, does not
count. The peak is what a step adds to the allocated memory, plus the contender's own weights and optimizer state.
"""

import argparse
import json
import random
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.nn import linear_cross_entropy
from training_tasks import language_model

CONTENDERS = ("outside", "forward", "chunked")
SHAPES = {"cuda": (50304, 768, 12, 12, 1024), "cpu": (8192, 64, 2, 4, 64)}  # vocabulary, width, depth, heads, length
ROWS = {"cuda": 32, "cpu": 4}
WARM_UP, TIMED = 2, 8  # steps of a block
GIB = 2**30


class LanguageModel(nn.Module):
    """A decoder that returns logits ("outside") or losses."""

    def __init__(self, contender: str, shape: tuple[int, ...], chunk: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.contender, self.chunk = contender, chunk
        self.decoder = language_model(*shape)
        self.decoder.head = nn.Identity()  # the decoder returns what the head gets; its weight is that of the embedding

    def forward(self, tokens, labels):  # noqa: D102 see the class
        x, weight = self.decoder(tokens), self.decoder.tokens.weight
        if self.contender == "chunked":
            return linear_cross_entropy(x, weight, labels, chunk=self.chunk)
        logits = linear(x, weight)
        return logits if self.contender == "outside" else plain_losses(logits, labels)


def plain_losses(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


class Block:
    """The time and the peak memory of the steps of one block."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seconds, self.bytes = 0.0, 0

    def start(self) -> None:  # noqa: D102 see the class
        if self.cuda:
            torch.cuda.synchronize()
            self.bytes = -torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.seconds = -time.perf_counter()

    def stop(self) -> None:  # noqa: D102 see the class
        if self.cuda:
            torch.cuda.synchronize()
            self.bytes += torch.cuda.max_memory_allocated()
        self.seconds += time.perf_counter()


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *moments))


def measure(args: argparse.Namespace, folder: str) -> list[dict[str, object]]:
    """Train all contenders in turns; returns one row per contender."""
    shape, rows = SHAPES[args.device], args.rows or ROWS[args.device]
    turns = [name for number in range(args.rounds + 1) for name in random.Random(number).sample(CONTENDERS, 3)]
    tokens = torch.randint(0, shape[0], (rows * (WARM_UP + TIMED), shape[4] + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])  # an epoch is a block
    with Run(global_batch=rows, seed=0, folder=folder, compile=args.compile) as run:
        models = {name: run.wrap(LanguageModel(name, shape, args.chunk)) for name in CONTENDERS}
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
        blocks: dict[str, list[Block]] = {name: [] for name in CONTENDERS}
        for epoch in run.shard(data, shuffle=True, num_workers=0).epochs(len(turns)):
            name, block = turns[epoch.number], Block(run.device)
            for number, step in enumerate(epoch):
                if number == WARM_UP:
                    block.start()
                for inputs, labels in step:
                    outputs = models[name](inputs, labels)
                    step.mean(plain_losses(outputs, labels) if name == "outside" else outputs).backward()
                    del outputs
                optimizers[name].step()
                optimizers[name].zero_grad()
            block.stop()
            blocks[name].append(block)
        sizes = {name: state_bytes(models[name], optimizers[name]) for name in CONTENDERS}
    return [summarize(args, name, blocks, sizes[name]) for name in CONTENDERS]


def summarize(args: argparse.Namespace, name: str, blocks: dict[str, list[Block]], state: int) -> dict[str, object]:
    counted, reference = blocks[name][1:], blocks["outside"][1:]  # the first round compiles
    return {
        "contender": name,
        "device": args.device,
        "compile": args.compile,
        "ms": 1e3 * statistics.median(block.seconds for block in counted) / TIMED,
        "ratio": statistics.median(one.seconds / other.seconds for one, other in zip(counted, reference, strict=True)),
        "peak_gib": (state + max(block.bytes for block in counted)) / GIB if args.device == "cuda" else None,
        "state_gib": state / GIB,
        "rounds": len(counted),
        "torch": torch.__version__,
    }


def line(row: dict[str, object]) -> str:
    peak = "peak not measured" if row["peak_gib"] is None else f"peak {row['peak_gib']:7.2f} GiB"
    kind = "compiled" if row["compile"] else "eager"
    state = f"of which weights and moments {row['state_gib']:.2f} GiB"
    return f"{row['contender']:8} {kind:9} {row['ms']:9.2f} ms/step   x {row['ratio']:.4f}   {peak}, {state}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, help="rows per step; default: 32, or 4 on the CPU")
    parser.add_argument("--chunk", type=int, help="tokens per chunk; default: that of linear_cross_entropy")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, folder):
            print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
