"""Precision on several ranks: one choice for all, overflow on all, sharded weights, activation checkpointing."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.environment.hardware import probe_bf16
from samestep.nn import ConditioningDropout
from samestep.parallel import wrap

CLASSES = 3


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dtypes = []

    def forward(self, x):
        out = self.linear(self.norm(x))
        self.dtypes.append(out.dtype)
        return x + torch.relu(out)


class Net(nn.Module):
    """A trunk of blocks with a frozen layer in front, and conditioning that is dropped per sample."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.condition, self.dropped = nn.Linear(6, 8), ConditioningDropout(0.4, null="learned", shape=(8,))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        y = self.frozen(x) + self.dropped(self.condition(x))
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def data(n=20):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator))


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(precision="auto", strategy=None, blow_up=None, compile=False, epochs=3, **wrap):
    """Train a few epochs and return what the tests compare. `blow_up`: (rank, step) whose loss is enormous."""
    with Run(global_batch=8, seed=0, precision=precision, compile=compile) as run:
        model = run.wrap(Net(), strategy, **wrap)
        net = getattr(model, "module", model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps = []
        for epoch in run.shard(data(), shuffle=True).epochs(epochs):
            for step in epoch:
                before = [full(p) for p in model.parameters()]
                for inputs, labels in step:
                    outputs = model(inputs)
                    assert outputs.dtype == torch.float32
                    losses = cross_entropy(outputs, labels, reduction="none")
                    factor = 1e9 if blow_up == (run.rank, step.number) else 1.0
                    step.mean(losses * factor).backward()
                kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
                optimizer.step()
                optimizer.zero_grad()
                moved = any(not torch.equal(a, full(p)) for a, p in zip(before, model.parameters(), strict=True))
                steps.append((step.finite(), moved, kinds))
        with run.evaluate(model) as evaluated:
            evaluated(torch.ones(2, 6))
        scale = run._lifecycle.context.acceleration.loss_scale
        return {
            "weights": {name: full(p) for name, p in run._lifecycle.context.models[0].inner.named_parameters()},
            "steps": steps,
            "scale": None if scale is None else scale.factor,
            "computed": {dtype for block in getattr(net, "_orig_mod", net).blocks for dtype in block.dtypes},
        }


def largest_difference(a, b):
    assert list(a) == list(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def different_precisions():
    import os

    with Run(global_batch=8, precision="fp32" if os.environ["RANK"] == "0" else "fp16"):
        pass


def test_ranks_with_different_precisions_raise(ranks):
    for text in ranks.errors(2, different_precisions):
        assert (
            "CommunicationError: rank 0 has Run(precision='fp32', compile=False) and rank 1 has Run(precision='fp16'"
            in text
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_drops_the_step_on_all(ranks, strategy):
    for result in ranks(2, train, "fp16", strategy, (1, 4)):
        finite = [finite for finite, _, _ in result["steps"]]
        assert not finite[4]
        assert [moved for _, moved, _ in result["steps"]] == finite  # a dropped step changes no weight, the others do
        assert result["scale"] == 65536.0 / 2 ** finite.count(False)
        assert all(bool(value.isfinite().all()) for value in result["weights"].values())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp16_trains_the_same_as_one_rank(ranks, strategy):
    alone = ranks(1, train, "fp16")[0]
    for result in ranks(2, train, "fp16", strategy):
        assert result["computed"] == {torch.float16}
        assert {kind for _, _, kinds in result["steps"] for kind in kinds} == {torch.float32}
        assert [finite for finite, _, _ in result["steps"]] == [finite for finite, _, _ in alone["steps"]]
        assert largest_difference(result["weights"], alone["weights"]) < 0.02  # Adam moves 0.01 per step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_computes_in_bf16_and_keeps_weights_and_gradients_in_fp32(ranks, strategy):
    if probe_bf16().status != "works":
        pytest.skip("bf16 kills processes on this CPU without a setting that must be made before they start")
    for result in ranks(2, train, "bf16", strategy):
        assert result["computed"] == {torch.bfloat16}
        assert {value.dtype for value in result["weights"].values()} == {torch.float32}
        assert {kind for _, _, kinds in result["steps"] for kind in kinds} == {torch.float32}


class Watched(nn.Module):
    """Blocks that all train; remembers whether autocast is on inside, and raises if an input has five columns."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, CLASSES)
        self.autocast = []

    def forward(self, x):
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        if x.shape[1] == 5:
            raise ValueError("five columns")
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "rows": len(x)}


def outputs_under_autocast(strategy):
    """What a sharded model returns under autocast, as in a step on a GPU until the loss is computed, and without."""
    with Run(global_batch=8, precision="fp16") as run:
        net = Watched()
        model = run.wrap(net, strategy)
        with torch.autocast("cpu", torch.float16):
            inside = model(torch.ones(4, 8))["logits"]
            with pytest.raises(ValueError, match="five columns"):
                model(torch.ones(4, 5))
            still_on = torch.is_autocast_enabled("cpu")
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        plain = model(torch.ones(4, 8))["logits"]
        (inside.float() + plain).sum().backward()
        with run.evaluate(model) as evaluated:
            in_evaluation = evaluated(torch.ones(4, 8))["logits"]
        kinds = [tensor.dtype for tensor in (inside, product, plain, in_evaluation)]
        return kinds, still_on, net.autocast, {dtype for block in net.blocks for dtype in block.dtypes}


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_outputs_of_a_sharded_model_keep_their_dtype_until_the_loss_and_are_fp32_otherwise(ranks, strategy):
    half = torch.float16
    for kinds, still_on, inside, computed in ranks(2, outputs_under_autocast, strategy):
        assert kinds == [half, half, torch.float32, torch.float32]
        assert still_on
        assert not any(inside)  # FSDP casts weights and inputs of the model
        assert computed == {half}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_activation_checkpointing_changes_no_bit_on_several_ranks(ranks, strategy):
    for result, again in zip(
        ranks(2, train, "auto", strategy), ranks(2, train_with_checkpointing, strategy), strict=True
    ):
        assert largest_difference(result["weights"], again["weights"]) == 0


def train_with_checkpointing(strategy):
    return train(strategy=strategy, activation_checkpointing=(Block, ConditioningDropout))


def train_compiled(strategy=None):
    import warnings

    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch warns when it first compiles
    with torch.compiler.set_stance("force_eager"):
        return train(strategy=strategy, compile=True)


@pytest.mark.slow
def test_a_compiled_model_with_frozen_parts_trains_the_same_on_several_ranks(ranks):
    plain = ranks(2, train)[0]
    for result in ranks(2, train_compiled):
        assert not any("_orig_mod" in name for name in result["weights"])
        assert largest_difference(result["weights"], plain["weights"]) == 0


def outputs_reported(strategy, compiled):
    """What a run prints about large outputs, if those of three rows count as large."""
    before, wrap._LARGE_OUTPUT = wrap._LARGE_OUTPUT, 3 * CLASSES * 4
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(printed):
            train_compiled(strategy) if compiled else train(strategy=strategy)
    finally:
        wrap._LARGE_OUTPUT = before
    return [line for line in printed.getvalue().splitlines() if "the compiled model returns a tensor of shape" in line]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_whose_compiled_model_returns_large_logits_says_once_what_to_do(ranks, strategy):
    first, second = ranks(2, outputs_reported, strategy, True)
    assert (len(first), len(second)) == (1, 0), first  # on rank 0
    assert "compute the loss in forward: samestep.nn.linear_cross_entropy for a language model" in first[0]
    assert ranks(2, outputs_reported, strategy, False) == [[], []]
