"""The replica check: names tensor, ranks and step of a difference, and ignores what may differ."""

import pytest
import torch
from torch import nn

from samestep import Run
from tests.ranks.expected import ignore_batchnorm_warning

DATA = list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def train(replica_check_every, change, strategy=None):
    """Six steps; in step 2 rank 1 changes something on its own."""
    with Run(global_batch=8, replica_check_every=replica_check_every, start_timeout=20, step_timeout=20) as run:
        with ignore_batchnorm_warning():
            model = run.wrap(Net(), strategy)
        inner = getattr(model, "module", model)
        optimizer = torch.optim.AdamW(model.parameters())
        for epoch in run.shard(DATA).epochs(2):
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 2 and run.rank == 1:
                    with torch.no_grad():
                        change(inner, optimizer)
        return run._lifecycle.context.progress.steps, inner.norm.running_mean.tolist()


def nothing(inner, optimizer):
    pass


def nudge_weight(inner, optimizer):
    weight = inner.head.weight
    weight[0, 2] = torch.nextafter(weight[0, 2], torch.tensor(1.0))


def nudge_moment(inner, optimizer):
    optimizer.state[inner.body.bias]["exp_avg"][1] += 1e-3


def nudge_buffer(inner, optimizer):
    inner.seen[0] = 1


@pytest.mark.parametrize(
    ("change", "name"),
    [(nudge_weight, "head.weight"), (nudge_moment, "body.bias (exp_avg of AdamW)"), (nudge_buffer, "seen")],
)
def test_the_first_difference_is_named_with_ranks_and_step(ranks, change, name):
    # by step 3 the change would have spread to other tensors, except for a buffer
    for text in ranks.errors(3, train, 1, change):
        assert (
            f"ReplicasDiffer: after step 2, ranks hold different bits in '{name}': ranks [0, 2] differ from ranks [1]."
            in text
        )
        assert (
            "Something changed it on some ranks only: an optimizer step under a rank condition, an update outside the"
            in text
        )
        assert "samestep stops the run, since its ranks no longer train the same model" in text


def test_replicas_are_compared_every_replica_check_every_steps(ranks):
    for text in ranks.errors(2, train, 2, nudge_buffer):
        assert (
            "ReplicasDiffer: after step 3, ranks hold different bits in 'seen': ranks [0] differ from ranks [1]."
            in text
        )


def test_replica_check_every_zero_turns_it_off(ranks):
    assert [steps for steps, _ in ranks(2, train, 0, nudge_buffer)] == [6, 6]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_statistics_and_shards_may_differ_between_ranks(ranks, strategy):
    (steps, first), (_, second) = ranks(2, train, 1, nothing, strategy)
    assert steps == 6
    assert first != second
