"""Unused parameters: plain DDP, the errors of samestep, and conditioning dropout that uses all parameters."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep import Run
from samestep.nn import ConditioningDropout
from tests.warm import RankFailed

GENERATOR = torch.Generator().manual_seed(2)
DATA = list(zip(torch.randn(12, 4, generator=GENERATOR), torch.randn(12, 3, generator=GENERATOR), strict=True))
DROP = 0.5


class Encoder(nn.Module):
    """The part that is skipped. Not a container, so FSDP gathers it with the root module on all ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, condition):
        return self.second(self.first(condition).tanh())


class Branching(nn.Module):
    """Skips its encoder for a full batch: the usual way to drop a condition."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(4, 1)

    def forward(self, x, condition, drop):
        return self.head(x if drop else x + self.encoder(condition))


class Blending(nn.Module):
    """Drops the condition sample by sample, with every parameter in the graph."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.dropout = ConditioningDropout(DROP, null="learned", shape=(4,))
        self.head = nn.Linear(4, 1)

    def forward(self, x, condition, drop):
        return self.head(x + self.dropout(self.encoder(condition)))


def plain_ddp():
    """Two steps of plain DDP, the first without the condition; the error of the second."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Branching())
    x, condition = torch.ones(2, 4), torch.ones(2, 3)
    model(x, condition, drop=True).sum().backward()
    message = ""
    try:
        model(x, condition, drop=False)
    except RuntimeError as error:
        message = str(error)
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return message


def test_plain_ddp_fails_in_the_step_after_a_batch_without_condition(ranks):
    for message in ranks(2, plain_ddp):
        assert "Expected to have finished reduction in the prior iteration before starting a new one" in message


def coin(step, rank):
    """Whether this rank drops the condition of its micro-batch: each rank draws on its own, as scripts do."""
    return bool(torch.rand((), generator=torch.Generator().manual_seed(10 * step + rank)) < DROP)


def train(kind):
    """How often AdamW has stepped the encoder, its weights, and what was printed about the search."""
    folder = Path("run")
    with Run(global_batch=4, folder=folder) as run:
        model = run.wrap(kind(), unused_parameters="allow")
        inner = getattr(model, "module", model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for epoch in run.shard(DATA, shuffle=True).epochs(5):
            for step in epoch:
                for x, condition in step:
                    step.mean(model(x, condition, coin(step.number, run.rank)).square().squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([p.detach().reshape(-1) for p in inner.parameters()])
        stepped = int(optimizer.state[inner.encoder.first.weight]["step"])
        first = run.is_main
    printed = (
        [line for line in (folder / "log.txt").read_text().splitlines() if "unused_parameters=" in line]
        if first
        else []
    )
    return stepped, weights, printed


def test_with_allow_the_result_depends_on_the_number_of_ranks(ranks):
    (alone, one, _), (together, two, _) = ranks(1, train, Branching)[0], ranks(2, train, Branching)[0]
    # one rank skips the encoder if its draw says so, two ranks only if both draws do
    assert alone == sum(not coin(step, 0) for step in range(15)) == 6
    assert together == sum(not (coin(step, 0) and coin(step, 1)) for step in range(15)) == 9
    assert float((one - two).abs().max()) > 1e-2


@pytest.mark.slow
def test_conditioning_dropout_trains_the_same_on_any_number_of_ranks(ranks):
    stepped, one, _ = ranks(1, train, Blending)[0]
    assert stepped == 15
    for size in (2, 4):
        for steps, weights, _ in ranks(size, train, Blending):
            assert steps == 15
            assert float((one - weights).abs().max()) < 1e-6


def test_the_cost_of_the_search_is_printed_once(ranks):
    assert ranks(1, train, Branching)[0][2] == []
    printed = ranks(2, train, Branching)[0][2]
    assert len(printed) == 1
    assert "unused_parameters='allow': the search for unused parameters takes " in printed[0]
    assert " ms per step (" in printed[0]
    assert "% of the forward pass); whether a parameter is skipped depends on the number of ranks" in printed[0]


def branch(strategy, dropping):
    """A normal step, then one in which the ranks of `dropping` skip the encoder."""
    with Run(global_batch=4, start_timeout=20, step_timeout=20) as run:
        model = run.wrap(Branching(), strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        for epoch in run.shard(DATA, micro_batch=1).epochs(1):
            for step in epoch:
                for x, condition in step:
                    drop = step.number == 1 and run.rank in dropping
                    step.mean(model(x, condition, drop).square().squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()


def check_message(text, rank, samples):
    assert (
        f"WrapError: step 1 did not use 4 parameter(s) of Encoder at 'encoder' on rank {rank}: encoder.first.weight, "
        "encoder.first.bias, encoder.second.weight, encoder.second.bias. The samples that took the other branch are "
        f"{samples}."
    ) in text
    assert "Use them at every step (for dropped conditioning: samestep.nn.ConditioningDropout)" in text
    assert "freeze what never trains (parameter.requires_grad_(False))" in text
    assert "accept the search and its cost: run.wrap(model, unused_parameters='allow')" in text


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_unused_parameters_are_named_with_samples_and_remedies(ranks, size, strategy):
    last = {1: [7], 2: [5, 7]}[size]
    for rank, text in enumerate(ranks.errors(size, branch, strategy, {0, 1})):
        check_message(text, rank, last[rank])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_if_one_rank_has_unused_parameters_all_ranks_raise(ranks, strategy):
    with pytest.raises(RankFailed) as failure:
        ranks(2, branch, strategy, {1})
    check_message(failure.value.errors[1], 1, 7)
    assert "sent no answer" not in failure.value.errors[0]
