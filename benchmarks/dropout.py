"""The cost of keyed dropout: training steps whose dropout is keyed by sample, compared with torch's own dropout.

    python benchmarks/dropout.py [--rounds 20] [--json]
    python benchmarks/dropout.py --device cuda [--compile]
    python benchmarks/dropout.py --attention-dropout 0.1 [--device cuda]

On the CPU the model is the transformer of benchmarks/overhead.py with dropout 0.1, on a GPU GPT-2 small with 32 x 1024
tokens in bf16. Both contenders run the same loop in one process, in turn; ratios are medians over the rounds. Memory is
the peak of a step on the GPU, and on the CPU what the forward pass keeps for the backward pass. The model without
dropout runs with the mode switched off, as in any run that draws nothing.

Attention dropout is 0, as in most current models, and the fused kernel computes the attention. With --attention-dropout
torch's fused kernel draws the mask itself, and keyed dropout computes the attention weights instead. A second line
compares both with eager attention, which computes the weights in the model, as `attn_implementation="eager"` does.
"""

import argparse
import json
import math
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from samestep.data.sample_rng import sample_key_tensor
from samestep.parallel.model_randomness import ModelRandomness

SIZES = {"cpu": (1024, 256, 6, 8, 64, 4), "cuda": (50304, 768, 12, 12, 1024, 32)}


def fused(p):
    """Attention in a fused kernel."""
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def eager(p):
    """Attention with weights that the model computes and drops."""

    def attend(q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return dropout(scores.masked_fill(~allowed, -math.inf).softmax(-1).to(v.dtype), p) @ v

    return attend


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width, heads, p, attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        """Attend, then transform every token."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A decoder with dropout after the embeddings and in every layer."""

    def __init__(self, vocabulary, width, layers, heads, length, p, attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(p)
        self.blocks = nn.Sequential(*(Block(width, heads, p, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        """Return the logits."""
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        return self.head(self.norm(self.blocks(x)))


class Contender:
    """A model and the loop body of one step; keyed or not."""

    def __init__(self, args, p, attention, keyed) -> None:
        torch.manual_seed(0)
        *shape, self.rows = SIZES[args.device]
        self.device, self.keyed = torch.device(args.device), keyed
        self.model = LanguageModel(*shape, p, attention).to(self.device)
        self.call = torch.compile(self.model) if args.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, shape[0], (self.rows, shape[4] + 1), device=self.device)
        self.randomness = ModelRandomness(0, 0, self.device, print)
        self.randomness.add_model(self.model, None)
        self.steps = 0

    def step(self) -> None:
        """Run one step."""
        if not self.keyed:
            return self.compute()
        keys = lambda: sample_key_tensor(0, self.steps, torch.arange(self.rows, device=self.device))  # noqa: E731
        with self.randomness.micro_batch("training", self.steps, 0, keys):
            self.compute()
        self.steps += 1
        return None

    def compute(self) -> None:
        """Run the loop body."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.call(self.tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps) -> float:
        """Return the seconds per step."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - start) / steps

    def memory(self) -> float:
        """Return how many GiB a step needs on top of what it starts with, on the CPU what it keeps for backward."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return (torch.cuda.max_memory_allocated() - before) / 2**30
        kept = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def note(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.step()
        return sum(size for storage, size in kept.items() if storage not in own) / 2**30

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(args, p, attention) -> dict[str, float]:
    """Return the time and the memory of torch's dropout, and the ratio of keyed dropout to it."""
    contenders = [Contender(args, p, attention, keyed) for keyed in (False, True)]
    steps = 10 if args.device == "cuda" else 3
    for contender in contenders:
        contender.seconds(6)
    ratios, times = [], []
    for number in range(args.rounds):
        order = contenders if number % 2 else contenders[::-1]
        seconds = {contender.keyed: contender.seconds(steps) for contender in order}
        ratios.append(seconds[True] / seconds[False])
        times.append(seconds)
    found = {"ratio": statistics.median(ratios), "native_ms": 1e3 * statistics.median(t[False] for t in times)}
    native, keyed = (contender.memory() for contender in contenders)
    return found | {"native_gib": native, "keyed_gib": keyed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention-dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1) if args.device == "cpu" else None
    torch.set_float32_matmul_precision("high")
    p = args.attention_dropout
    if p:
        cases = {f"attention dropout {p:g}, fused": (0.1, fused(p)), f"attention dropout {p:g}, eager": (0.1, eager(p))}
    else:
        cases = {"dropout 0.1": (0.1, fused(0.0)), "no dropout": (0.0, fused(0.0))}
    found = {name: compare(args, *case) for name, case in cases.items()}
    if args.json:
        print(json.dumps(found))
        return
    for name, numbers in found.items():
        memory = f"{numbers['native_gib']:.3f} and {numbers['keyed_gib']:.3f} GiB"
        print(f"{name}: keyed x {numbers['ratio']:.3f} of native ({numbers['native_ms']:.1f} ms per step, {memory})")


if __name__ == "__main__":
    main()
