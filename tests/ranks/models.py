"""Small models, each with its data and its loss, that are trained alike on one rank and on several."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from samestep.nn import ConditioningDropout

# A bias that a following norm or a softmax takes away again has no gradient but rounding, which Adam would blow up to
# whole steps of the learning rate: such biases are left out.


class Mlp(nn.Module):
    """Two linear layers; its few outputs leave ranks of a sharded model without a part of the last one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU())
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(x))


class ConvNet(nn.Module):
    """Two convolutions, each with a norm."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1, bias=False), norm(8), nn.GELU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8), nn.GELU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def group_norm(channels):
    return nn.GroupNorm(2, channels)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        rows, length, width = x.shape
        heads = self.qkv(self.first(x)).reshape(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.second(x))


class Transformer(nn.Module):
    """Two blocks over short texts of different lengths."""

    def __init__(self, words=11, width=8):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Conditioned(nn.Module):
    """A regression whose condition is dropped for a third of the samples."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.drop = ConditioningDropout(0.35, null="learned", shape=(8,))
        self.body = nn.Sequential(nn.Linear(6 + 8, 12), nn.GELU(), nn.Linear(12, 2))

    def forward(self, x, condition):
        return self.body(torch.cat([x, self.drop(self.encoder(condition))], dim=1))


class Adapted(nn.Module):
    """A frozen body, whose BatchNorm and dropout must stay asleep, between an adapter and a head that train."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.GELU())
        self.body[1].running_mean.uniform_(-1, 1)
        self.body.requires_grad_(False)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(self.adapter(x)))


def classify(model, step, batch):
    x, y = batch
    return step.mean(cross_entropy(model(x), y, reduction="none"))


def predict_words(model, step, batch):
    tokens, mask = batch
    scores = model(tokens, mask)
    losses = cross_entropy(scores[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return step.mean(losses, mask[:, 1:])


def regress(model, step, batch):
    x, condition, y = batch
    noisy = x + 0.1 * step.normal(6).to(x.dtype)
    return step.mean(mse_loss(model(noisy, condition), y, reduction="none").mean(dim=1))


def vectors(n, generator):
    x = torch.randn(n, 6, generator=generator)
    return x, (x[:, :3] + 0.5 * torch.randn(n, 3, generator=generator)).argmax(dim=1)


def images(n, generator):
    return torch.randn(n, 2, 5, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def texts(n, generator):
    lengths = torch.randint(2, 8, (n, 1), generator=generator)
    return torch.randint(0, 11, (n, 7), generator=generator), torch.arange(7) < lengths


def conditions(n, generator):
    x, condition = torch.randn(n, 6, generator=generator), torch.randn(n, 4, generator=generator)
    return x, condition, x[:, :2] * condition[:, :2]


@dataclass(frozen=True)
class Task:
    """A model with its data and its loss."""

    model: Callable[[], nn.Module]
    data: Callable[..., tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    samples: int = 23
    """With a global batch of 7: three full steps and one of 2 samples, fewer than four ranks."""
    one_micro_batch: bool = False
    """BatchNorm sees a micro-batch at a time, so its statistics are those of the step only if there is one."""


TASKS = {
    "mlp": Task(Mlp, vectors, classify),
    "group norm": Task(lambda: ConvNet(group_norm), images, classify),
    # the last step has 4 samples: BatchNorm cannot leave out the padding of a rank that has nothing else
    "sync batchnorm": Task(lambda: ConvNet(nn.BatchNorm2d), images, classify, samples=18, one_micro_batch=True),
    "masked tokens": Task(Transformer, texts, predict_words),
    "conditioning dropout": Task(Conditioned, conditions, regress),
    "frozen parts": Task(Adapted, vectors, classify),
}


def dataset(task, dtype):
    """The data of a task, always the same."""
    made = task.data(task.samples, torch.Generator().manual_seed(5))
    return TensorDataset(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in made))
