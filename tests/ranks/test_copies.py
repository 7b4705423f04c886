"""Copies of a wrapped model, such as a moving average or a target network, are independent of it."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from samestep import Run

ROWS = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.line(x))


def build():
    return nn.Sequential(Block(), nn.Linear(4, 1))


def difference(one, other):
    return (one - other).detach().abs().max().item()


def average_while_training(options):
    """The difference between the outputs of a moving average and those of a new model with its weights."""
    with Run(global_batch=4) as run:
        net = build()
        model = run.wrap(net, **options)
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in run.shard(ROWS).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).square()).backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged.update_parameters(net)
        fresh = build()
        fresh.load_state_dict(averaged.module.state_dict())
        x = torch.stack(ROWS)
        with run.evaluate(averaged) as evaluated_model:
            gap = difference(evaluated_model(x), fresh(x))
        return gap, difference(averaged(x), fresh(x)), difference(net(x), fresh(x))


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": (Block,)}, {"unused_parameters": "allow"}])
@pytest.mark.parametrize("size", [1, 2])
def test_a_moving_average_uses_its_own_weights(ranks, size, options):
    for evaluated, trained, moved in ranks(size, average_while_training, options):
        assert evaluated == trained == 0.0
        assert moved > 1e-3


def train_with_target_network():
    with Run(global_batch=4) as run:
        net = build()
        model, target = run.wrap(net), copy.deepcopy(net).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in run.shard(ROWS).epochs(2):
            for step in epoch:
                for x in step:
                    step.mean((model(x) - 2.0 * target(x)).square()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return nn.utils.parameters_to_vector(net.parameters()).detach()


def test_a_target_network_may_be_called_in_a_step(ranks):
    (alone,) = ranks(1, train_with_target_network)
    for weights in ranks(2, train_with_target_network):
        assert torch.allclose(weights, alone, rtol=0, atol=1e-6)


def train_mode_of_a_copy():
    with Run(global_batch=4) as run:
        net = nn.Sequential(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Dropout(0.5)), nn.Linear(4, 1))
        run.wrap(net)
        other = copy.deepcopy(net).train()
        x = torch.stack(ROWS)
        other(x)
        return net[0].training, other[0].training, other[1].training


def test_frozen_parts_of_a_copy_stay_in_eval_mode(ranks):
    assert ranks(1, train_mode_of_a_copy) == [(False, False, True)]
