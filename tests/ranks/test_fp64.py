"""precision="fp64": an unchanged script in float64, so that what remains between world sizes is not rounding."""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run, read_metrics
from samestep.errors import ConfigError

TOLERANCE = 1e-12


class Net(nn.Module):
    """ReLU, BatchNorm and max-pooling, which amplify rounding; dropout, noise and a tensor made in the forward pass."""

    def __init__(self):
        super().__init__()
        # a bias before BatchNorm has a gradient of rounding only, which Adam divides by its size
        convolution = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.body = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 9, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("order", torch.arange(72))

    def forward(self, x):
        features = dropout(self.body(x).flatten(1)[:, self.order], 0.1, self.training)
        features = features + 0.01 * torch.randn_like(features)
        return self.head(features * self.scale + torch.ones(1))


def images(n=40):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (n,), generator=generator))


class Records(IterableDataset):
    def __iter__(self):
        return iter(list(images()))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def train(precision="fp64", strategy=None, epochs=3, folder="run", streamed=False):
    """A script that says nothing about dtypes; returns weights, losses and the dtypes it met."""
    before = torch.get_default_dtype()
    with Run(global_batch=9, seed=0, precision=precision, folder=folder) as run:
        model = run.wrap(Net(), strategy, sync_batchnorm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        data = run.stream(Records()) if streamed else run.shard(images(), shuffle=True)
        checkpoint = run.checkpoint("saved", model=model, optimizer=optimizer, train=data)
        seen = set()
        for epoch in data.epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    noise = 0.1 * step.normal(1, 6, 6)
                    losses = cross_entropy(model(inputs + noise), labels, reduction="none")
                    step.mean(losses).backward()
                    seen |= {inputs.dtype, noise.dtype, losses.dtype}
                    assert labels.dtype == torch.int64
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.save()
        test = run.shard(images())
        with run.evaluate(model) as net:
            accuracy = run.mean(net(inputs).argmax(-1) == labels for inputs, labels in test)
            seen |= {drawn.dtype for _ in test for drawn in (test.normal(2), test.random(2))}
        weights = {name.removeprefix("module."): full(value) for name, value in model.state_dict().items()}
        seen |= {value.dtype for value in weights.values() if value.is_floating_point()}
        is_main = run.is_main
    assert torch.get_default_dtype() == before
    losses = [r["train/loss"] for r in read_metrics(f"{folder}/metrics.jsonl", by_step=True)] if is_main else []
    return {"weights": weights, "losses": losses, "dtypes": seen, "accuracy": accuracy}


def largest_difference(one, other):
    return max(float((one[name].double() - value.double()).abs().max()) for name, value in other.items())


@pytest.mark.parametrize(
    ("size", "strategy"),
    [pytest.param(2, "ddp", marks=pytest.mark.slow), (3, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.slow)],
)
def test_a_script_without_dtypes_trains_the_same_in_float64_on_any_number_of_ranks(
    ranks, size, strategy, tmp_path, monkeypatch
):
    alone = ranks(1, train)[0]
    assert alone["dtypes"] == {torch.float64}
    (tmp_path / "several").mkdir()
    monkeypatch.chdir(tmp_path / "several")
    several = ranks(size, train, "fp64", strategy)
    for result in several:
        assert result["dtypes"] == {torch.float64}
        assert result["accuracy"] == alone["accuracy"]
        assert largest_difference(result["weights"], alone["weights"]) < TOLERANCE
    assert several[0]["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert len(alone["losses"]) == 15


def test_the_same_script_in_fp32_differs_by_rounding_that_training_amplifies(ranks, tmp_path, monkeypatch):
    alone = ranks(1, train, "fp32")[0]
    (tmp_path / "several").mkdir()
    monkeypatch.chdir(tmp_path / "several")
    difference = largest_difference(ranks(2, train, "fp32", "ddp")[0]["weights"], alone["weights"])
    assert difference > 1e3 * TOLERANCE


def test_batches_of_a_stream_are_converted(ranks):
    assert ranks(1, train, "fp64", None, 1, "run", True)[0]["dtypes"] == {torch.float64}


def train_on(first, then):
    train(first, epochs=1, folder="first")
    return train(then, epochs=2, folder="then")


def test_a_checkpoint_of_another_precision_is_loaded_and_converted(ranks):
    assert ranks(1, train_on, "fp32", "fp64")[0]["dtypes"] == {torch.float64}
    assert ranks(1, train_on, "fp64", "fp32")[0]["dtypes"] == {torch.float32}


def train_with_variable(precision):
    os.environ["SAMESTEP_PRECISION"] = "fp64"
    return train(precision)


@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_an_environment_variable_replaces_the_precision_of_the_script(ranks, precision):
    assert ranks(1, train_with_variable, precision)[0]["dtypes"] == {torch.float64}


def test_the_reason_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("SAMESTEP_PRECISION", "fp64")
    with Run(global_batch=4) as run:
        run.wrap(nn.Linear(1, 1))
    assert "precision: fp64 (by SAMESTEP_PRECISION); torch.compile off\n" in capsys.readouterr().out


def test_an_unknown_precision_in_the_environment_raises(monkeypatch):
    monkeypatch.setenv("SAMESTEP_PRECISION", "double")
    with pytest.raises(ConfigError, match="SAMESTEP_PRECISION='double' is not valid: use one of 'auto', 'fp32', "):
        Run(global_batch=4)


def compute_with_float32(layer, shape):
    with Run(global_batch=4, precision="fp64") as run:
        run.wrap(layer)(torch.ones(shape).float())


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(6, 3), (1, 6)), (nn.Conv2d(1, 2, 3), (1, 1, 6, 6)), (nn.LSTM(6, 3), (1, 1, 6))]
)
def test_float32_by_name_in_a_run_of_fp64_gets_a_note(layer, shape):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        compute_with_float32(layer, shape)
    assert caught.value.__notes__ == [
        "this run computes in float64, and the script makes tensors of another type: remove .float() and "
        "dtype=torch.float32, or use x.to(weight.dtype)"
    ]


def call_teacher(placement):
    torch.save(nn.Linear(4, 3).state_dict(), "teacher.pt")
    with Run(global_batch=4, precision="fp64") as run:
        teacher = run.teacher(build_teacher, weights="teacher.pt", placement=placement)
        return teacher(torch.ones(2, 4)).dtype


def build_teacher():
    return nn.Linear(4, 3)


@pytest.mark.parametrize("placement", ["cpu", "offload"])
def test_a_teacher_computes_in_float64_too(ranks, placement):
    assert ranks(1, call_teacher, placement) == [torch.float64]
