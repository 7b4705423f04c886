"""Evaluation: every sample once on uneven ranks, no hangs, and the model as before afterwards."""

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from samestep import Run
from samestep.errors import WrapError

N = 10
DATA = [(torch.full((4,), float(i)), i) for i in range(N)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen_dropout = nn.Dropout(0.9)
        self.body = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.9)
        self.frozen_dropout.eval()

    def forward(self, x):
        return self.dropout(self.body(self.frozen_dropout(x)))


def modes(strategy):
    """Modes inside and after an evaluation that succeeds, and after one that raises."""
    with Run(global_batch=4) as run:
        model = run.wrap(Net(), strategy)
        inner = getattr(model, "module", model)
        inner.frozen_dropout.eval()
        seen = []
        with run.evaluate(model) as net:
            seen.append(([m.training for m in inner.modules()], torch.is_grad_enabled(), net(torch.ones(1, 4)).grad_fn))
        seen.append([m.training for m in inner.modules()])
        try:
            with run.evaluate(model) as net:
                raise ValueError("a bad metric")
        except ValueError:
            seen.append([m.training for m in inner.modules()])
        return seen, torch.is_grad_enabled()


@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_modes_are_restored_also_after_an_exception(ranks, size, strategy):
    for (inside, after, after_error), grad_enabled in ranks(size, modes, strategy):
        assert inside == ([False] * 4, False, None)
        assert after == after_error == [True, False, True, True]
        assert grad_enabled


def count(strategy, micro_batch, n=N, batches_only=False):
    """Count, sum and maximum of the samples of an evaluation, and the batches of this rank."""
    with Run(global_batch=8) as run:
        model = run.wrap(nn.Linear(4, 4), strategy)
        test = run.shard(DATA[:n], micro_batch=micro_batch)
        batches = []

        def values(net):
            for x, index in test:
                batches.append(len(index))
                assert net(x).shape == (len(index), 4)
                yield index

        with run.evaluate(model) as net:
            seen = run.sum(torch.ones_like(index) for index in values(net)), run.mean(values(net)), run.max(values(net))
        for epoch in test.epochs(1):  # training continues unaffected
            for step in epoch:
                for x, _ in step:
                    step.mean(model(x).sum(dim=1)).backward()
        return *seen, batches


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy", "micro_batch"), [(1, None, None), (4, "ddp", 1), (4, "ddp", None)])
def test_uneven_evaluation_counts_every_sample_once(ranks, size, strategy, micro_batch):
    for total, mean, largest, _ in ranks(size, count, strategy, micro_batch):
        assert (total, mean, largest) == (N, 4.5, 9)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "micro_batch"), [(N, 1), (N, None), (3, None)])
def test_ranks_call_a_sharded_model_equally_often_and_padding_does_not_count(ranks, n, micro_batch):
    by_rank = ranks(4, count, "fsdp", micro_batch, n)
    for total, mean, largest, _ in by_rank:
        assert (total, mean, largest) == (n, (n - 1) / 2, n - 1)
    assert len({len(batches) for *_, batches in by_rank}) == 1
    copies = sum(sum(batches) for *_, batches in by_rank) - 3 * n
    assert copies == {(N, 1): 6, (N, None): 0, (3, None): 3}[n, micro_batch]


def several(strategy):
    with Run(global_batch=8) as run:
        model = run.wrap(nn.Linear(4, 4), strategy)
        test = run.shard(DATA, micro_batch=1)
        with run.evaluate(model) as net:
            return run.means({"index": index, "one": net(x)[:, 0] * 0 + 1} for x, index in test)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_padding_does_not_count_in_run_means(ranks, strategy):
    assert ranks(4, several, strategy) == [{"index": (N - 1) / 2, "one": 1.0}] * 4


def test_torchs_distributed_sampler_counts_twelve_of_ten_samples():
    parts = [list(DistributedSampler(range(N), num_replicas=4, rank=rank, shuffle=False)) for rank in range(4)]
    assert sum(map(len, parts)) == 12


def collect_first():
    with Run(global_batch=8, start_timeout=20, step_timeout=20) as run:
        model = run.wrap(nn.Linear(4, 4), "fsdp")
        test = run.shard(DATA, micro_batch=1)
        with run.evaluate(model) as net:
            seen = [(net(x), index) for x, index in test]
        run.mean(index for _, index in seen)


def mean_of_batches():
    with Run(global_batch=8, start_timeout=20, step_timeout=20) as run:
        model = run.wrap(nn.Linear(4, 4), "fsdp")
        test = run.shard(DATA, micro_batch=1)
        with run.evaluate(model) as net:
            run.mean(net(x).mean() for x, _ in test)


@pytest.mark.slow
def test_padding_that_would_count_raises(ranks):
    texts = ranks.errors(4, collect_first)
    for text in texts[2:]:
        assert "DataError: this rank had no sample left and got a padding row, so that all ranks call" in text
        assert (
            "would count: pass the values as they come, as in run.mean(net(x).argmax(-1) == y for x, y in test)" in text
        )
    for text in texts[:2]:
        assert "RankMissing" in text


@pytest.mark.slow
def test_a_single_value_per_batch_raises_for_padding(ranks):
    for text in ranks.errors(4, mean_of_batches)[2:]:
        assert (
            "CommunicationError: this batch has 1 row(s), 1 of them padding, and run.mean, run.sum or run.max got a "
            "single value" in text
        )
        assert "pass one value per sample (reduction='none') instead of one per batch" in text


def accuracy():
    with Run(global_batch=8) as run:
        model = run.wrap(nn.Linear(4, 4))
        test = run.shard(DATA)
        with run.evaluate(model) as net:
            return run.mean(net(x).argmax(-1).mul(0) == index for x, index in test)


def test_the_mean_of_booleans_is_a_fraction(ranks):
    for size in (1, 3):
        assert ranks(size, accuracy) == [0.1] * size


def not_wrapped():
    with Run(global_batch=8) as run:
        with run.evaluate(nn.Dropout(0.5)) as net:
            value = run.mean(net(torch.ones(100)))
        return value, net.training


def test_a_function_cannot_be_evaluated():
    with (
        Run(global_batch=8) as run,
        pytest.raises(
            WrapError, match=r"run\.evaluate needs a torch\.nn\.Module, got builtin_function_or_method: pass"
        ),
        run.evaluate(torch.relu),
    ):
        pass


def test_a_model_that_was_not_wrapped_can_be_evaluated(ranks):
    assert ranks(2, not_wrapped) == [(1.0, True)] * 2
