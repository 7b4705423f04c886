"""What a step has computed is freed with it, without the garbage collector: on a GPU it would add up in its memory."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from samestep import Run

STEPS = 6
DATA = torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A layer that draws."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.linear(x)) + 0.1 * torch.rand_like(x)


class Net(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Rows(IterableDataset):
    """The data as a stream."""

    def __iter__(self):
        return iter(DATA)


class Alive:
    """Counts the tensors of earlier micro-batches that still exist, with the collector switched off."""

    def __init__(self):
        self.references, self.counts = [], []

    def see(self, *tensors):
        self.counts.append(sum(reference() is not None for reference in self.references))
        self.references += [weakref.ref(tensor) for tensor in tensors]


def count(case, strategy, checkpointed):
    """How many tensors of earlier micro-batches are alive at each micro-batch of a loop."""
    gc.collect()
    gc.disable()
    alive = Alive()
    try:
        with Run(global_batch=4, seed=0) as run:
            options = {"activation_checkpointing": (Block,)} if checkpointed else {}
            model = run.wrap(Net(), None if run.size == 1 else strategy, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if case == "evaluation":
                with run.evaluate(model) as net:
                    for x in run.shard(DATA, num_workers=0, micro_batch=2):
                        y = net(x)
                        alive.see(x, y)
                        del x, y
                return alive.counts
            source = run.stream(Rows()) if case == "stream" else run.shard(DATA, shuffle=True, num_workers=0)
            for epoch in source.epochs(1):
                for step in epoch:
                    for x in step:
                        y = model(x)
                        alive.see(x, y)
                        losses = (run.gather(y).sum() - y).square().mean(1) if case == "gather" else y.square().mean(1)
                        loss = step.mean(losses)
                        alive.references += [weakref.ref(losses), weakref.ref(loss)]
                        loss.backward()
                        del x, y, losses, loss
                    optimizer.step()
                    optimizer.zero_grad()
        return alive.counts
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("case", ["training", "stream", "evaluation", "gather"])
def test_nothing_of_a_micro_batch_is_alive_at_the_next(ranks, case, size, strategy, checkpointed):
    for counts in ranks(size, count, case, strategy, checkpointed):
        assert len(counts) >= STEPS // 2
        assert counts == [0] * len(counts)
