"""What a model draws that cannot be keyed by sample: a warning once, on rank 0, with the module and the line."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence

from samestep import Run, SamestepWarning

ROWS, TIME, WIDTH = 8, 3, 4  # two ranks have 4 rows each


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.rand(x.shape[0], TIME, WIDTH, generator=self.rng)  # draws


class Attend(nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # draws


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        packed = pack_padded_sequence(x, [TIME] * len(x), batch_first=True)
        return x + self.lstm(packed)[1][0][-1].unsqueeze(1)  # draws


class Mix(nn.Module):
    def forward(self, x):
        return x + x[torch.randperm(len(x))]  # draws


class Mapped(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row + torch.rand(WIDTH), randomness="different")(x)  # draws


class MappedTheSame(nn.Module):
    def forward(self, x):
        noise = torch.vmap(lambda row: row * 0 + torch.rand(TIME, WIDTH), randomness="same")(x)
        assert all(torch.equal(each, noise[0]) for each in noise)
        return x + nn.functional.dropout(noise)


class Hidden(nn.Module):
    """Moves torch's generator without a torch function, as a custom kernel does."""

    def forward(self, x):
        torch.default_generator.manual_seed(99)
        return x


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleDict({"part": part()})

    def forward(self, x):
        return self.encoder["part"](self.body(x))


def warned(part, evaluate=False):
    """The warnings of this rank, in an evaluation or in a training of 2 epochs with several steps."""
    with Run(global_batch=ROWS, seed=0) as run:
        model = run.wrap(Model(part))
        run._lifecycle.context.randomness._mode.attention_layers = 1 << 60  # whose weights do not fit
        shard = run.shard(list(torch.ones(4 * ROWS, TIME, WIDTH)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if evaluate:
                with run.evaluate(model) as net:
                    run.mean(net(x).mean((1, 2)) for x in shard)
            else:
                for epoch in shard.epochs(2):
                    for step in epoch:
                        for x in step:
                            step.mean(model(x).mean((1, 2))).backward()
                        model.zero_grad()
    return [str(one.message) for one in caught if issubclass(one.category, SamestepWarning)]


def draw_line(part):
    """The line of this file at which the module draws."""
    first = part.forward.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if number > first and text.endswith("# draws"))


CASES = {
    OwnGenerator: (
        "rand(generator=...) draws for the rows of a micro-batch from a generator of your own, so the numbers of a "
        "sample depend on the number of ranks: omit generator=, and samestep keys the draw by sample, or use "
        "step.random, step.normal or step.rng(row)"
    ),
    Attend: (
        "scaled_dot_product_attention(dropout_p=0.5) computes in a fused kernel, since its attention weights of 0.0 "
        "GiB per layer do not fit into the free memory: its dropout mask depends on the number of ranks and on "
        "micro_batch; everything else is keyed by sample. Pass a smaller micro_batch=, or turn attention dropout off"
    ),
    Packed: (
        "a recurrent layer with dropout=0.5 between its layers got a packed sequence, whose rows samestep cannot "
        "assign to samples: its dropout mask depends on the number of ranks; pass padded sequences, or one nn.LSTM or "
        "nn.GRU per layer with nn.Dropout in between"
    ),
    Mix: (
        "torch.randperm(4) permutes the rows of the micro-batch, which couples its samples, so the result depends on "
        "the number of ranks and on micro_batch: permute the dataset instead, or draw a partner per sample in the "
        "dataset"
    ),
    Mapped: (
        "inside of torch.vmap(..., randomness='different') samestep cannot key random numbers by sample: they depend "
        "on the number of ranks and on micro_batch; draw them before, as in torch.rand(x.shape[0], ...), and pass them "
        "to the function"
    ),
}


@pytest.mark.parametrize(("part", "evaluate"), [*((part, False) for part in CASES), (OwnGenerator, True), (Mix, True)])
def test_a_draw_that_cannot_be_keyed_is_reported_once_with_module_and_line(ranks, part, evaluate):
    name = "encoder.part.lstm" if part is Packed else "encoder.part"
    expected = f"{CASES[part]} (at {__file__}:{draw_line(part)}, in module '{name}')"
    assert ranks(2, warned, part, evaluate) == [[expected], []]


@pytest.mark.parametrize("evaluate", [False, True])
def test_an_unseen_draw_is_reported_once_with_its_module(ranks, evaluate):
    text = (
        "random numbers are drawn in encoder.part (Hidden) in a way that samestep cannot key by sample (a custom "
        "kernel, or code that reads torch's generator itself): they depend on the number of ranks and on micro_batch; "
        "use torch.rand, torch.randn, torch.bernoulli or F.dropout there, or step.random and step.normal"
    )
    assert ranks(2, warned, Hidden, evaluate) == [[text], []]


@pytest.mark.parametrize("evaluate", [False, True])
def test_the_same_draw_for_all_rows_in_vmap_is_keyed_and_not_reported(ranks, evaluate):
    assert ranks(2, warned, MappedTheSame, evaluate) == [[], []]
