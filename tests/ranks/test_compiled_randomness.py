"""What a compiled model draws: the same on any number of ranks as without a compiler."""

import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.data import sample_rng

FEATURES, WIDTH = 6, 8
pytestmark = pytest.mark.slow


class Layer(nn.Module):
    """Dropout and noise."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(functional.gelu(self.linear(x)))
        return x + 0.1 * torch.randn_like(x) * torch.rand(())


class Noisy(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.last(functional.dropout(x, 0.2, self.training)).sum(-1)


def train(compiled=False, strategy=None, micro_batch=None, checkpointed=None):
    """Train on this rank: the weights, and the loss of an evaluation, in which the layers draw noise too."""
    inputs = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1))
    with Run(global_batch=6, seed=3, compile=compiled) as run:
        blocks = {"activation_checkpointing": (Layer,)} if checkpointed == "by run.wrap" else {}
        model = run.wrap(Noisy(checkpointed == "in forward").double(), strategy, **blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in run.shard(data, shuffle=True, micro_batch=micro_batch).epochs(2):
            for step in epoch:
                for x, y in step:
                    noisy = x + 0.1 * torch.randn(x.shape[0], FEATURES, dtype=x.dtype)
                    step.mean((model(noisy) - y) ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        test = run.shard(data, micro_batch=micro_batch)
        with run.evaluate(model) as net:
            loss = run.mean((net(x) - y) ** 2 for x, y in test)
        weights = [getattr(p, "full_tensor", p.detach)().detach().flatten() for p in model.parameters()]
    return torch.cat([*weights, torch.tensor([loss], dtype=torch.float64)])


def train_compiled(*args):
    """The same with a compiler whose graphs, like those of Inductor, do not show a mode what they draw."""
    for text in ("`torch.jit", "The .grad attribute of a Tensor that is not a leaf"):
        warnings.filterwarnings("ignore", text)  # torch warns while it compiles
    torch.compiler.reset()  # otherwise shapes that an earlier test has compiled are part of this one
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train(True, *args)


@pytest.fixture(scope="module")
def expected(ranks, tmp_path_factory):
    """The result of one rank without a compiler."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("eager"))
        return ranks(1, train)[0]


@pytest.mark.parametrize(
    ("size", "strategy", "micro_batch", "checkpointed"),
    [
        (1, None, 2, None),
        (2, None, None, None),
        (2, None, None, "in forward"),
        (2, None, None, "by run.wrap"),
        (2, "fsdp", None, "by run.wrap"),
        (2, "fsdp", None, "in forward"),
        (3, None, None, None),
        (2, "fsdp", None, None),
    ],
)
def test_a_compiled_model_draws_the_same_on_any_number_of_ranks(
    ranks, expected, size, strategy, micro_batch, checkpointed
):
    for result in ranks(size, train_compiled, strategy, micro_batch, checkpointed, timeout=250):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


def train_after_inference_mode(*args):
    """As in a process whose first compiled draw is in an evaluation of Lightning, which is in inference mode."""
    with patch.dict(sample_rng._STRIDES_FOR_GRAPHS, clear=True):
        with torch.inference_mode():
            sample_rng.prepare_for_graphs(torch.device("cpu"))
        return train_compiled(*args)


def test_a_compiled_model_trains_after_draws_in_inference_mode(ranks, expected):
    for result in ranks(2, train_after_inference_mode, "fsdp", None, "by run.wrap", timeout=250):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)
