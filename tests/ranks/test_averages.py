"""run.average: a moving average of the weights with every strategy, in evaluation and in checkpoints."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.torch_private import copy_without_weights, is_fsdp

DECAY = 0.8


class Net(nn.Module):
    """A block that FSDP gathers by itself, two with the same weight, which it does not, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, 6))
        self.blocks[2].weight = self.blocks[0].weight
        self.frozen = nn.BatchNorm1d(6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.blocks(self.frozen(x)))


def dataset():
    inputs = torch.randn(22, 6, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().flatten()


def train(folder, strategy, epochs, options=None):
    """The weights of the average after training, its score, and how far the model is from it."""
    with Run(global_batch=8, seed=1, folder=folder / "logs") as run:
        model = run.wrap(Net(), None if run.size == 1 else strategy, **(options or {}))
        ema = run.average(model, decay=DECAY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        data = run.shard(dataset(), shuffle=True)
        checkpoint = run.checkpoint(folder / "out", model=model, ema=ema, optimizer=optimizer, train=data)
        for epoch in data.epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
            with run.evaluate(ema) as net:  # between two epochs too: training and averaging continue afterwards
                loss = run.mean(cross_entropy(net(x), y, reduction="none") for x, y in data)
        checkpoint.save()
        assert isinstance(ema, AveragedModel)
        names = [name for name, _ in ema.named_parameters()]
        weights = torch.cat([full(parameter) for parameter in ema.parameters()])
        distance = (torch.cat([full(parameter) for parameter in model.parameters()]) - weights).abs().max()
        return {
            "names": names,
            "weights": weights,
            "loss": loss,
            "distance": float(distance),
            "updates": int(ema.n_averaged),
        }


def reference(epochs):
    """The average of the weights of the steps on one rank, computed by hand."""
    with Run(global_batch=8, seed=1) as run:
        model = run.wrap(Net())
        optimizer, average = torch.optim.SGD(model.parameters(), lr=0.3), None
        for epoch in run.shard(dataset(), shuffle=True).epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                weights = torch.cat([full(parameter) for parameter in model.parameters()])
                average = weights if average is None else DECAY * average + (1 - DECAY) * weights
        return average


def assert_same(found, expected):
    for each in found:
        assert each["names"] == expected["names"]
        assert each["updates"] == expected["updates"]
        assert each["distance"] > 1e-3
        assert torch.allclose(each["weights"], expected["weights"], rtol=0, atol=1e-6)
        assert each["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """Two epochs on one rank without a restart."""
    (result,) = ranks(1, train, tmp_path_factory.mktemp("alone"), None, 2)
    return result


def test_the_average_on_one_rank_is_that_of_the_weights_after_each_step(ranks, alone):
    (expected,) = ranks(1, reference, 2)
    assert torch.allclose(alone["weights"], expected, rtol=0, atol=1e-6)
    assert alone["updates"] == 6


@pytest.mark.parametrize(
    ("size", "strategy", "options"),
    [
        (2, "ddp", {}),
        (3, "fsdp", {}),
        (2, "zero2", {}),
        (2, "fsdp", {"activation_checkpointing": (nn.Linear,), "unused_parameters": "allow"}),
    ],
)
def test_the_average_does_not_depend_on_the_world_size_or_strategy(ranks, tmp_path, alone, size, strategy, options):
    assert_same(ranks(size, train, tmp_path, strategy, 2, options), alone)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_three(ranks, tmp_path, alone, strategy, size):
    ranks(2, train, tmp_path, strategy, 1)
    (index,) = (tmp_path / "out").glob("step-*/index.json")
    assert "ema/module.blocks.0.weight" in json.loads(index.read_bytes())
    assert_same(ranks(size, train, tmp_path, strategy, 2), alone)


def statistics(folder, save):
    """Running means of an average whose model has a BatchNorm that sees the rows of its own rank."""
    with Run(global_batch=8, seed=1, folder=folder / "logs") as run, warnings.catch_warnings(action="ignore"):
        model = run.wrap(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
        ema, optimizer = run.average(model), torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = run.checkpoint(folder / "out", model=model, ema=ema)
        if save:
            for epoch in run.shard(dataset()).epochs(1):
                for step in epoch:
                    for inputs, _ in step:
                        step.mean(model(inputs).square().sum(dim=1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ema.update_parameters(model)
            own = ema.module[0].running_mean.tolist()
            checkpoint.save()
            return own
        return ema.module[0].running_mean.tolist()


def test_the_saved_statistics_of_an_average_are_those_of_all_ranks(ranks, tmp_path):
    first, second = ranks(2, statistics, tmp_path, True)
    assert first != second
    mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    assert ranks(1, statistics, tmp_path, False) == [pytest.approx(mean, abs=1e-6)]


def before_and_after(strategy):
    """Whether a new average has the weights of the model, what it shares with it, and the types of its modules."""
    with Run(global_batch=8, seed=1) as run:
        model = run.wrap(Net(), None if run.size == 1 else strategy)
        ema, x = run.average(model), dataset().tensors[0]
        inner = getattr(model, "module", model)
        with run.evaluate(model) as net:
            expected = net(x)
        with run.evaluate(ema) as net:
            found = net(x)
        tied = ema.module.blocks[2].weight is ema.module.blocks[0].weight
        shared = {id(p) for p in inner.parameters()} & {id(p) for p in ema.parameters()}
        kinds = [type(module).__name__ for module in ema.module.modules()]
        same_kinds = kinds == [type(module).__name__ for module in inner.modules()]
        sharded = [is_fsdp(module) for module in (ema.module, ema.module.blocks[3])]
        return torch.equal(found, expected), tied, len(shared), same_kinds, sharded


@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_a_new_average_is_an_independent_copy_that_is_sharded_as_the_model(ranks, size, strategy):
    sharded = [strategy == "fsdp"] * 2
    assert ranks(size, before_and_after, strategy) == [(True, True, 0, True, sharded)] * size


def copied_structure():
    with Run(global_batch=8, seed=1) as run:
        net = Net()
        run.wrap(net, "fsdp")
        copied = copy_without_weights(net)
        fsdp = [is_fsdp(module) for module in net.modules()], [is_fsdp(module) for module in copied.modules()]
        meta = [parameter.is_meta for parameter in copied.parameters()]
        hooks = [len(module._forward_pre_hooks) for module in (net.blocks[3], copied.blocks[3])]
        return fsdp, meta, hooks, list(copied.state_dict()) == list(net.state_dict())


def test_torch_private_copies_a_sharded_model_without_weights_and_hooks_of_fsdp(ranks):
    for (net, copied), meta, hooks, same_names in ranks(2, copied_structure):
        assert (any(net), any(copied)) == (True, False)
        assert meta == [True] * 5 + [False] * 2 + [True] * 2  # the frozen part is not sharded
        assert hooks[0] == hooks[1] + 1
        assert same_names


def average_of_another():
    with Run(global_batch=8) as run:
        run.average(nn.Linear(1, 1))


def average_with_decay(decay):
    with Run(global_batch=8) as run:
        run.average(run.wrap(nn.Linear(1, 1)), decay)


def test_wrong_arguments_are_named(ranks):
    (text,) = ranks.errors(1, average_of_another)
    assert "WrapError: run.average got a Linear that run.wrap has not returned: wrap the model first" in text
    for decay in (1.5, "0.9"):
        (text,) = ranks.errors(1, average_with_decay, decay)
        assert (
            f"WrapError: run.average got decay={decay!r}: pass the weight of the old average, a number from 0" in text
        )
