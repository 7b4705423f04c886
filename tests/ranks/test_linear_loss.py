"""The chunked loss of a language model: the same on any number of ranks, and the same as with all logits."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.nn import linear_cross_entropy

WORDS, WIDTH, LENGTH, SAMPLES = 13, 6, 5, 23  # with a global batch of 7, the last step has 2 samples
TOLERANCE = 1e-12


class Layer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


class LanguageModel(nn.Module):
    """Returns the losses of the next tokens; embedding and head may share their weight."""

    def __init__(self, tied, chunk):
        super().__init__()
        self.chunk = chunk
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens, labels):
        x = self.hidden(tokens)
        if self.chunk is None:
            return cross_entropy(self.head(x).transpose(1, 2), labels, reduction="none")
        return linear_cross_entropy(x, self.head.weight, labels, self.head.bias, chunk=self.chunk)


def texts():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return TensorDataset(tokens[:, :-1], labels)


class HiddenStates(LanguageModel):
    """Returns what the head gets, so that the script computes the losses."""

    def forward(self, tokens, _):
        return self.hidden(tokens)


def train(
    strategy=None,
    chunk=4,
    tied=True,
    micro_batch=None,
    masked=True,
    checkpointed=False,
    compiled=False,
    outside=False,
):
    """Two epochs; returns the weights."""
    with Run(global_batch=7, seed=3, precision="fp64", compile=compiled) as run:
        net = (HiddenStates if outside else LanguageModel)(tied, chunk)
        model = run.wrap(net, strategy, activation_checkpointing=(Layer,) if checkpointed else ())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for epoch in run.shard(texts(), shuffle=True, micro_batch=micro_batch).epochs(2):
            for step in epoch:
                for tokens, labels in step:
                    losses = model(tokens, labels)
                    if outside:
                        losses = linear_cross_entropy(losses, net.head.weight, labels, net.head.bias, chunk=chunk)
                    step.mean(losses, mask=labels != -100 if masked else None).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: full(value) for name, value in net.state_dict().items()}


def train_compiled(strategy):
    for text in ("`torch.jit", "The .grad attribute of a Tensor that is not a leaf"):
        warnings.filterwarnings("ignore", text)  # torch warns while it compiles
    torch.compiler.reset()  # otherwise shapes that an earlier test has compiled are part of this one
    return train(strategy, micro_batch=2, compiled=True)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def check(expected, results):
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert value.dtype == torch.float64
            assert (result[name] - value).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_one_rank_trains_the_weights_of_the_plain_loss(ranks, tied, masked):
    expected = ranks(1, train, None, None, tied, None, masked)[0]
    check(expected, ranks(1, train, None, 4, tied, 2, masked))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("tied", [True, False])
def test_several_ranks_train_the_weights_of_one_rank(ranks, strategy, tied):
    expected = ranks(1, train, None, None, tied)[0]
    check(expected, ranks(3, train, strategy, 4, tied))
    check(expected, ranks(2, train, strategy, 3, tied, 2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_activation_checkpointing_changes_nothing(ranks, strategy):
    expected = ranks(1, train)[0]
    check(expected, ranks(2, train, strategy, 4, True, 2, True, True))


@pytest.mark.parametrize("tied", [True, False])
def test_with_ddp_the_script_may_compute_the_losses_of_what_the_model_returns(ranks, tied):
    expected = ranks(1, train, None, None, tied)[0]
    check(expected, ranks(2, train, "ddp", 4, tied, 2, True, False, False, True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_model_trains_the_same_weights(ranks, strategy):
    expected = ranks(1, train)[0]
    check(expected, ranks(2, train_compiled, strategy, timeout=500))


def use_outside_of_forward():
    with Run(global_batch=4, precision="fp64") as run:
        model = run.wrap(LanguageModel(True, 4), "fsdp")
        labels = torch.zeros(2, dtype=torch.long)
        linear_cross_entropy(torch.zeros(2, WIDTH, dtype=torch.float64), model.head.weight, labels)


def test_a_sharded_weight_raises(ranks):
    for error in ranks.errors(2, use_outside_of_forward):
        assert (
            "StepError: linear_cross_entropy got a sharded weight (a DTensor of shape (13, 6)): FSDP gathers it only "
            "while the module that holds it runs, so call linear_cross_entropy in the forward of the wrapped model and "
            "return the losses; if blocks= contains the class of the head, call it in the forward of the head"
        ) in error
