"""Models, data and losses of benchmarks/overhead.py.

torch is imported in the ranks, since they set variables before.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

LOSSES = {
    "outside": "outside of the model, from the logits that it returns",
    "fp32": "the same from an fp32 copy of the logits",
    "compiled": "outside of the model, compiled by itself",
    "forward": "in the forward of the model",
    "chunked": "the same, by linear_cross_entropy",
}


@dataclass(frozen=True)
class Task:
    """A model with its data, and the length of a turn."""

    name: str
    rows: int  # samples per rank and step
    steps: int  # per epoch
    warm_up: int  # steps of a turn before the timer starts
    timed: int  # timed steps of a turn
    device: str
    compile: bool
    world: int
    strategy: str  # "ddp", "fsdp" or "zero2"; one rank uses none
    micro_batches: int  # per rank and step
    loss: str  # one of LOSSES


def build(task: Task):
    """Create model and data, the same on every rank and for every contender."""
    import torch

    torch.manual_seed(0)
    n = task.rows * task.world * task.steps
    if task.name == "mlp":
        data = Rows(torch.randn(n, 784), torch.randint(0, 10, (n,)))
        sizes = (784, 512, 512, 10)
        layers = [m for a, b in pairwise(sizes) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers[:-1])
    else:
        shape = {"transformer": (1024, 256, 6, 8, 64), "gpt2": (50304, 768, 12, 12, 1024)}[task.name]
        tokens = torch.randint(0, shape[0], (n, shape[4] + 1))
        model, data = language_model(*shape), Rows(tokens[:, :-1], tokens[:, 1:])
    return (with_losses(task, model) if task.loss in ("forward", "chunked") else model), data


class Rows:
    """A map-style dataset that is read row by row."""

    def __init__(self, inputs, targets) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index], self.targets[index]


def language_model(vocabulary: int, width: int, depth: int, heads: int, length: int):
    """A decoder like GPT-2 with scaled_dot_product_attention; embedding and head share their weights."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

        def forward(self, x):
            rows, steps, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(rows, steps, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, width))
            return x + self.mlp(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Decoder()


def with_losses(task: Task, model):
    """The model with its loss in `forward`, so that both are compiled together."""
    from torch import nn

    from samestep.nn import linear_cross_entropy

    if task.loss == "chunked":
        model.head = nn.Identity()  # its weight is that of the embedding

    class WithLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @property
        def blocks(self):
            return getattr(self.model, "blocks", self.model)

        def forward(self, inputs, targets, reduction: str):
            if task.loss == "chunked":
                values = linear_cross_entropy(self.model(inputs), self.model.tokens.weight, targets)
                return values.mean() if reduction == "mean" else values
            return plain_losses(task, self.model(inputs), targets, reduction)

    return WithLosses()


def losses(task: Task, model, inputs, targets, reduction: str):
    """The mean loss of a batch, or ("none") the losses of its samples or tokens."""
    if task.loss in ("forward", "chunked"):
        return model(inputs, targets, reduction)
    outputs = model(inputs)
    if task.loss == "compiled":
        return compiled_losses()(task, outputs, targets, reduction)
    return plain_losses(task, outputs.float() if task.loss == "fp32" else outputs, targets, reduction)


@cache
def compiled_losses():
    import torch

    return torch.compile(plain_losses)


def plain_losses(task: Task, outputs, targets, reduction: str):
    from torch.nn.functional import cross_entropy

    if task.name == "mlp":
        return cross_entropy(outputs, targets, reduction=reduction)
    value = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction=reduction)
    return value if reduction == "mean" else value.view(targets.shape)
