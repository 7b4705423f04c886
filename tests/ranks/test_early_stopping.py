"""run.early_stopping: the same decision on all ranks, also after a restart; and the norm of the gradients."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run, read_metrics
from tests.ranks.models import Mlp


def decisions(values, options):
    with Run(global_batch=4) as run:
        stopping = run.early_stopping(**options)
        return [stopping.update(value) for value in values], stopping.best


@pytest.mark.parametrize(
    ("values", "options", "expected", "best"),
    [
        ([3.0, 2.0, 2.0, 2.5, 1.0], {"patience": 2}, [False, False, False, True, False], 1.0),
        ([0.5, 0.6, 0.4], {"patience": 1, "mode": "max"}, [False, False, True], 0.6),
        ([1.0, 0.95, 0.8, 0.79], {"patience": 1, "min_delta": 0.1}, [False, True, False, True], 0.8),
        ([math.nan, 1.0, math.inf, math.nan], {"patience": 2}, [False, False, False, True], 1.0),
        ([torch.tensor(1.0), torch.tensor(2)], {"patience": 1}, [False, True], 1.0),
    ],
)
def test_it_stops_after_patience_updates_without_an_improvement(ranks, values, options, expected, best):
    assert ranks(2, decisions, values, options) == [(expected, best)] * 2


LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.1, 2.0]  # with a patience of 3 training stops after epoch 6


def train(folder, starts_after=None):
    """The epochs that this start trains; ends after one of them as if it were preempted."""
    with Run(global_batch=4, seed=1, folder=folder / "logs") as run:
        model, data = run.wrap(nn.Linear(3, 1)), run.shard(TensorDataset(torch.ones(4, 3)), num_workers=0)
        stopping = run.early_stopping(patience=3)
        checkpoint = run.checkpoint(folder / "out", model=model, train=data, stopping=stopping)
        epochs = []
        for epoch in data.epochs(len(LOSSES)):
            if stopping.stopped:
                break
            epochs.append(int(epoch.number))
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(dim=1)).backward()
            stopping.update(run.mean([LOSSES[epoch.number]]))
            checkpoint.save()
            if epoch.number == starts_after:
                break
        return epochs


def test_a_restarted_run_stops_after_the_same_epoch_and_then_trains_no_more(ranks, tmp_path):
    assert ranks(1, train, tmp_path / "alone") == [list(range(7))]
    assert ranks(2, train, tmp_path / "out", 4) == [[0, 1, 2, 3, 4]] * 2
    assert ranks(1, train, tmp_path / "out") == [[5, 6]]
    assert ranks(3, train, tmp_path / "out") == [[]] * 3


def update_with_own_value():
    with Run(global_batch=4) as run:
        run.early_stopping(patience=1).update(float(run.rank))


def test_a_value_of_one_rank_is_refused(ranks):
    zero, one = ranks.errors(2, update_with_own_value)
    assert "CommunicationError: stopping.update got 0 on rank 0 and 1 on rank 1, so one rank could stop without" in zero
    assert "stopping.update got 1 on rank 1 and 0 on rank 0" in one
    assert "pass a value over all ranks, such as run.mean(losses), run.max(...) or metric.compute()" in one


def update_with_rounding():
    with Run(global_batch=4) as run:
        stopping = run.early_stopping(patience=1)
        # rank 1 alone would see an improvement
        return stopping.update(0.7), stopping.update(0.7 - 1e-9 * run.rank), stopping.best


def test_a_value_that_differs_by_rounding_is_that_of_rank_0(ranks):
    assert ranks(2, update_with_rounding) == [(False, True, 0.7)] * 2


def create(options):
    with Run(global_batch=4) as run:
        run.early_stopping(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "ConfigError: patience=0 of run.early_stopping must be an integer of at least 1"),
        ({"patience": 1, "mode": "lower"}, "ConfigError: mode='lower' of run.early_stopping is not valid: use \"min\""),
        ({"patience": 1, "min_delta": -1}, "ConfigError: min_delta=-1 of run.early_stopping must be a number of at"),
    ],
)
def test_wrong_options_are_named(ranks, options, message):
    assert message in ranks.errors(1, create, options)[0]


# The norm of the gradients, by torch's functions


def norms(folder, strategy, limit):
    """Logged norms, and the weights after steps that were clipped by them."""
    inputs = torch.randn(22, 6, generator=torch.Generator().manual_seed(4))
    with Run(global_batch=8, seed=1, folder=folder) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in run.shard(TensorDataset(inputs), micro_batch=2).epochs(2):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).square().sum(dim=1)).backward()
                if limit is None:
                    norm = nn.utils.get_total_norm(p.grad for p in model.parameters())
                else:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
                run.log({"grad_norm": norm})
                optimizer.step()
                optimizer.zero_grad()
        full = [getattr(p, "full_tensor", p.detach)().detach().flatten() for p in model.parameters()]
        return torch.cat(full).tolist()


@pytest.mark.parametrize("limit", [None, 0.1])
def test_the_logged_norm_and_the_clipped_steps_do_not_depend_on_the_world_size(ranks, tmp_path, limit):
    def logged(folder):
        return [record["grad_norm"] for record in read_metrics(folder / "metrics.jsonl") if "grad_norm" in record]

    (alone,) = ranks(1, norms, tmp_path / "1", None, limit)
    expected = logged(tmp_path / "1")
    assert len(expected) == 6
    assert min(expected) > 0.15  # so that 0.1 clips every step
    for size, strategy in ((2, "ddp"), (3, "ddp"), (3, "fsdp")):
        folder = tmp_path / f"{size}-{strategy}"
        for weights in ranks(size, norms, folder, strategy, limit):
            assert weights == pytest.approx(alone, abs=1e-6)
        assert logged(folder) == pytest.approx(expected, rel=1e-5)
