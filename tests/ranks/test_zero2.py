"""zero2: gradients and optimizer state sharded, weights unsharded from the forward to the backward pass."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from samestep import Run
from samestep.parallel.fsdp import find_blocks

DATA = [(torch.randn(6, generator=torch.Generator().manual_seed(i)).double(), i % 3) for i in range(22)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def train(strategy, offload=False):
    """Two epochs in micro-batches, an evaluation after each, which gathers weights without a backward pass."""
    with Run(global_batch=8, seed=3) as run:
        model = run.wrap(Net().double(), strategy, cpu_offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data, tests = run.shard(DATA, shuffle=True, micro_batch=2), run.shard(DATA, micro_batch=3)
        accuracies = []
        for epoch in data.epochs(2):
            for step in epoch:
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
            with run.evaluate(model) as net:
                accuracies.append(run.mean(net(inputs).argmax(-1) == labels for inputs, labels in tests))
        return {name: full(value) for name, value in model.state_dict().items()}, accuracies


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_zero2_trains_the_same_as_one_rank(ranks, offload):
    ((expected, accuracies),) = ranks(1, train, None)
    for weights, seen in ranks(3, train, "zero2", offload):
        assert seen == accuracies
        for name, value in expected.items():
            assert float((weights[name] - value).abs().max()) < 1e-12, name


def bytes_held(strategy):
    """Elements of weights that a rank holds between a forward and its backward pass, and after both."""
    with Run(global_batch=8) as run:
        model = run.wrap(Net(), strategy)
        found = []
        for epoch in run.shard([(x.float(), y) for x, y in DATA[:8]]).epochs(1):
            for step in epoch:
                for inputs, labels in step:
                    loss = step.mean(cross_entropy(model(inputs), labels, reduction="none"))
                    found.append(_elements(model))
                    loss.backward()
        return *found, _elements(model)


def _elements(model):
    blocks = [p for block in find_blocks(model, ()) for p in block.parameters()]
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in blocks)


def test_zero2_keeps_weights_unsharded_until_the_backward_pass_and_fsdp_does_not(ranks):
    size = 2 * (6 * 6 + 6)
    assert ranks(2, bytes_held, "zero2") == [(size, size // 2)] * 2
    assert ranks(2, bytes_held, "fsdp") == [(size // 2, size // 2)] * 2
