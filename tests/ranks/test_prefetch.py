"""Batches that are copied ahead change nothing: the same weights, the same ledger, the same restarts."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

from samestep import Run
from samestep.data.audit import audit
from samestep.data.loader import move_to_device
from samestep.errors import SampleError
from samestep.training import shard, stream
from samestep.training.training_data import prefetch


class Noisy(Dataset):
    """Sample i is random, and drawn from the global generator; `bad` cannot be read."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("no such file")
        return torch.randn(4) + index, index % 3


class Records(IterableDataset):
    """The same samples in order."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for index in range(23):
            yield torch.randn(4, generator=generator) + index, index % 3


def copied_ahead(batches, device, dtype=None):
    """What `batches_on_device` does on CUDA, with a copy on the CPU."""
    return prefetch(batches, lambda batch: partial(move_to_device, batch, device, dtype))


def train(folder, ahead, kind="shard", num_workers=0, fail_at=None, bad=None):
    """Train two epochs of 4 steps of 3 micro-batches, and evaluate; return weights, evaluation and samples by step."""
    patches = [mock.patch.object(module, "batches_on_device", copied_ahead) for module in (shard, stream)]
    for patch in patches if ahead else []:
        patch.start()
    steps = []
    try:
        with Run(global_batch=7, seed=1, folder=folder, ledger=True) as run:
            torch.manual_seed(0)
            model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            if kind == "shard":
                data = run.shard(Noisy(bad), shuffle=True, num_workers=num_workers, micro_batch=3)
            else:
                data = run.stream(Records(), num_workers=num_workers, micro_batch=3)
            checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, data=data)
            checkpoint.every(steps=1)
            for epoch in data.epochs(2):
                for step in epoch:
                    steps.append([])
                    for inputs, labels in step:
                        if step.number == fail_at:
                            raise InterruptedError
                        step.mean(cross_entropy(model(inputs + torch.randn(4)), labels, reduction="none")).backward()
                        steps[-1] += step.last_indices
                    optimizer.step()
                    optimizer.zero_grad()
            with run.evaluate(model):
                scores = [float(model(inputs + data.normal(4)).sum()) for inputs, _ in data]
            return [value.detach().clone() for value in model.state_dict().values()], scores, steps
    except InterruptedError:
        return None
    finally:
        mock.patch.stopall()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_workers"), [("shard", 2), ("stream", 0)])
def test_training_and_evaluation_are_bit_identical_with_and_without(ranks, tmp_path, kind, num_workers):
    (weights, scores, steps), _ = ranks(2, train, tmp_path / "plain", False, kind, num_workers)
    (others, other_scores, other_steps), _ = ranks(2, train, tmp_path / "ahead", True, kind, num_workers)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    assert (scores, steps) == (other_scores, other_steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shard", "stream"])
def test_a_batch_that_was_copied_ahead_and_not_trained_is_trained_once_after_a_restart(ranks, tmp_path, kind):
    (plain,) = ranks(1, train, tmp_path / "plain", False, kind)
    folder = tmp_path / "interrupted"
    assert ranks(1, train, folder, True, kind, 0, 2) == [None]
    assert ranks(1, train, folder, True, kind, 0, 5) == [None]
    (resumed,) = ranks(1, train, folder, True, kind)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], resumed[0], strict=True))
    report = audit(folder)
    assert report.exactly_once
    assert [(epoch.number, epoch.samples) for epoch in report.shards[0].epochs] == [(0, 23), (1, 23)]


def failing_steps(folder, ahead):
    """Return the steps before a sample that cannot be read, in dataset order: the 9th, of the second step."""
    steps = 0
    with mock.patch.object(shard, "batches_on_device", copied_ahead) if ahead else nullcontext():
        try:
            with Run(global_batch=4, seed=1, folder=folder) as run:
                for epoch in run.shard(Noisy(bad=8), num_workers=0).epochs(1):
                    for step in epoch:
                        for _ in step:
                            pass
                        steps += 1
        except SampleError as error:
            return steps, str(error)
    return steps, None


def test_a_sample_that_cannot_be_read_fails_in_its_own_step(ranks, tmp_path):
    (plain,), (ahead,) = ranks(1, failing_steps, tmp_path / "a", False), ranks(1, failing_steps, tmp_path / "b", True)
    assert plain == ahead
    assert plain[0] == 2
    assert plain[1].startswith("sample 8 could not be read on rank 0, in the training process: ValueError: no such")
