"""What a model draws: the same on any number of ranks and any micro-batch size, and a warning for what cannot be."""

import random
import warnings
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.parallel.draw_rules import DRAW_RULES
from samestep.parallel.model_randomness import ModelRandomness

FEATURES, TIME = 6, 5


class Noise(nn.Module):
    """Every ordinary way to draw in a forward pass."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.drop, self.alpha, self.channels = nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout1d(0.3)
        self.checkpointed = checkpointed

    def hidden(self, x):
        return self.drop(functional.gelu(self.first(x)))

    def forward(self, x):
        x = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)
        x = functional.dropout(x, 0.1, self.training) + 0.1 * torch.randn_like(x) * torch.rand(3)[0]
        x = x * torch.empty([x.shape[0], 1]).bernoulli_(0.9) + 0.1 * torch.normal(torch.zeros_like(x), 0.5)
        x = self.alpha(x) + functional.gumbel_softmax(x, tau=2.0) + 0.1 * torch.randint(0, 3, (len(x), 1))
        x = self.channels(x.unsqueeze(-1)).squeeze(-1) + 0.01 * torch.poisson(x.detach().abs())
        x = torch.cat([x, x + 0.1 * torch.rand(x.size(0), 8)])
        x = functional.dropout(x, 0.2, self.training)
        if random.random() < 0.5 or np.random.rand() < 0.2:
            x = x * 1.5
        return self.last(x.reshape(2, -1, 8).mean(0)).sum(-1)


class Recurrent(nn.Module):
    """Layers with the batch in dimension 1; on two ranks a rank has as many rows as there are time steps."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(FEATURES, 8, 2, dropout=0.4), nn.GRU(8, 8, 2, dropout=0.3, bidirectional=True)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 1)

    def forward(self, x):
        x, _ = self.lstm(x.unsqueeze(0).repeat(TIME, 1, 1))
        x, _ = self.gru(self.drop(x))
        return self.last(self.drop(x)[-1]).sum(-1)


class TimeFirst(nn.Module):
    """The batch in dimension 1, which no layer shows: on two ranks a rank has as many rows as there are time steps."""

    def __init__(self):
        super().__init__()
        self.embed, self.last, self.drop = nn.Linear(FEATURES, 8), nn.Linear(8, 1), nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.embed(x).unsqueeze(0).repeat(TIME, 1, 1))
        return self.last(x + 0.1 * torch.randn_like(x))[-1].sum(-1)


class Attention(nn.Module):
    """Attention dropout in torch's layers, with and without the attention weights, and in a fused function."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        x = self.layer(self.embed(x).unsqueeze(1).repeat(1, 4, 1))
        x = x + self.attention(x, x, x, need_weights=True)[0]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True).mean(
            1
        ).repeat(1, 1, 2)
        return self.last(x[:, 0]).sum(-1)


MODELS = {
    "noise": Noise,
    "checkpointed": lambda: Noise(True),
    "recurrent": Recurrent,
    "attention": Attention,
    "declared": TimeFirst,
}


def data():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(29, FEATURES, generator=rng, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1))


def train(name, strategy=None, micro_batch=None, steps=None):
    """Train on this rank: weights, and the loss of an evaluation that draws noise."""
    with Run(global_batch=10, seed=3, folder=Path(f"{name}-{strategy}-{micro_batch}")) as run:
        net = MODELS[name]().double()
        model = run.wrap(net, strategy, batch_dim=1 if name == "declared" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        shard = run.shard(data(), shuffle=True, micro_batch=micro_batch)
        for epoch in shard.epochs(2):
            for step in epoch:
                for x, y in step:
                    step.mean((model(x + 0.1 * torch.randn(x.shape[0], FEATURES)) - y) ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        test = run.shard(data(), micro_batch=micro_batch)
        with run.evaluate(model) as net:
            noisy = run.mean((net(torch.randn_like(x) + test.normal(FEATURES)) - y).abs() for x, y in test)
        state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
        state = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    return {**state, "evaluation": torch.tensor(noisy, dtype=torch.float64)}


@pytest.fixture(scope="module")
def expected(ranks):
    """The result of one rank, by model."""
    return cache(lambda name: ranks(1, train, name)[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "strategy", "micro_batch"), [(2, None, None), pytest.param(3, "fsdp", 2, marks=pytest.mark.slow)]
)
def test_what_a_model_draws_does_not_depend_on_the_ranks(ranks, expected, name, size, strategy, micro_batch):
    one = expected(name)
    for result in ranks(size, train, name, strategy, micro_batch):
        assert_same(result, one)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_nor_on_the_micro_batch(ranks, expected, micro_batch):
    assert_same(ranks(1, train, "recurrent", None, micro_batch)[0], expected("recurrent"))


def test_activation_checkpointing_draws_the_same_again(expected):
    assert_same(expected("checkpointed"), expected("noise"))


def draw_both():
    with Run(global_batch=8, seed=0) as run:
        data, drawn = run.shard(TensorDataset(torch.zeros(8, 50))), []
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    drawn = [step.normal(50), torch.randn_like(x), step.random(50), torch.rand_like(x)]
        for (x,) in data:
            drawn += [data.normal(50), torch.randn_like(x)]
    return torch.stack(drawn).flatten(1)


def test_numbers_of_the_model_are_not_those_of_step_normal_and_step_random(ranks):
    (drawn,) = ranks(1, draw_both)
    correlation = torch.corrcoef(drawn) - torch.eye(6)
    assert correlation.abs().max() < 0.2  # 400 numbers each: 4 standard errors


def assert_same(result, one):
    for name, value in one.items():
        torch.testing.assert_close(
            result[name], value, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def compile_with_a_graph_break():
    """Differences between a compiled model with an RNN, which Dynamo does not trace, and the model itself."""
    randomness = ModelRandomness(0, 0, torch.device("cpu"), pytest.fail, always=True)
    model = Recurrent().double()
    randomness.add_model(model, None)
    inputs, results = data().tensors[0][:10], []
    for call, rows in (
        (model, 10),
        (torch.compile(model, backend="eager"), 10),
        (torch.compile(model, backend="eager"), 4),
    ):
        outputs = []
        for start in range(0, 10, rows):
            keys = partial(torch.arange, start, min(start + rows, 10))
            with randomness.micro_batch("training", 0, start, keys):
                outputs.append(call(inputs[start : start + rows]).detach())
        results.append(torch.cat(outputs))
    return [(result - results[0]).abs().max().item() for result in results]


@pytest.mark.slow
def test_a_compiled_model_with_graph_breaks_draws_the_same(ranks):
    assert max(ranks(1, compile_with_a_graph_break)[0]) < 1e-12


class Hidden(nn.Module):
    """Moves torch's generator without a torch function."""

    def forward(self, x):
        torch.default_generator.set_state(torch.Generator().manual_seed(99).get_state())
        return x


def warnings_of_a_compiled_model(micro_batches):
    said, model = [], nn.Sequential(Hidden())
    randomness = ModelRandomness(0, 0, torch.device("cpu"), said.append, always=True)
    randomness.add_model(model, None)
    for step in range(micro_batches):
        with randomness.micro_batch("training", step, 0, partial(torch.arange, 4)):
            model(torch.ones(4, 3))
    return said


def test_an_unseen_draw_of_a_compiled_model_is_reported_after_the_compiler_is_done(ranks):
    assert ranks(1, warnings_of_a_compiled_model, 15)[0] == []
    assert "random numbers are drawn in a compiled model in a way" in ranks(1, warnings_of_a_compiled_model, 17)[0][0]


def compile_each_function():
    """For each function that draws: whether the compiled one draws the same, and what is left of it in a graph."""
    from tests.unit.test_keyed_draws import FUNCTIONS, Draws

    others = {"_tiling", "_creating", "_shape", "_length", "_reordering"}  # rules of functions that draw nothing
    names = {function.__name__ for function, rule in DRAW_RULES.items() if rule.__name__ not in others}
    names -= {"fractional_max_pool2d"}  # torch's operation of this name is given its random numbers
    results = {}
    for name, function in FUNCTIONS.items():
        torch.compiler.reset()
        left = []

        def keep(graph, inputs, left=left):
            left.extend(getattr(node.target, "__name__", node.target) for node in graph.graph.nodes)
            return graph

        draws, eager = Draws(), Draws()
        draws.mode.expect_compiled_models()
        with warnings.catch_warnings():  # Dynamo makes an autograd.Function for Dirichlet, which is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled = draws(torch.compile(function, backend=keep), 0, 8)
        results[name] = torch.equal(compiled, eager(function, 0, 8)), sorted(set(left) & names)
    return results


@pytest.mark.slow
def test_every_function_draws_the_same_in_a_compiled_graph(ranks):
    (results,) = ranks(1, compile_each_function, timeout=250)
    assert {name: result for name, result in results.items() if result != (True, [])} == {}


def warnings_of_unclear_layouts(rows):
    """What a compiled model says about torch.randn_like of (rows, 4, 3)."""
    said = []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), said.append, always=True)
    model = torch.compile(torch.randn_like, backend="eager")
    for step in range(3):
        with randomness.micro_batch("training", step, 0, partial(torch.arange, rows)):
            model(torch.ones(rows, 4, 3))
    return said


@pytest.mark.slow
def test_a_compiled_model_reports_draws_that_it_may_assign_to_the_wrong_rows(ranks):
    assert ranks(1, warnings_of_unclear_layouts, 3) == [[]]
    ((unclear,),) = ranks(1, warnings_of_unclear_layouts, 4)
    assert unclear.startswith(
        "a draw of shape (4, 4, 3) in a compiled model may have the 4 rows of the micro-batch in more than one"
    )
    ((single,),) = ranks(1, warnings_of_unclear_layouts, 1)
    assert single.startswith("a compiled model draws random numbers in micro-batches of one row, where samestep cannot")
