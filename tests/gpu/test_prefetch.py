"""Batches on a GPU: the next one is copied while this one is computed, and nothing else changes."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from samestep import Run
from samestep.data.loader import move_to_device
from samestep.training import shard, stream, training_data
from samestep.training.training_data import CudaCopier, move_without_waiting

DEVICE = torch.device("cuda")
ROWS, STEPS = 4, 6
LARGE, SMALL = 8_000_000, 200_000  # values of a row: the copy of four large rows takes milliseconds


class Rows(Dataset):
    """Item i is a row whose every value is i."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return STEPS * ROWS

    def __getitem__(self, index):
        return torch.full((self.values,), float(index)), index


class RowRecords(IterableDataset):
    """The large rows as a stream."""

    def __iter__(self):
        rows = Rows(LARGE)
        return (rows[index] for index in range(len(rows)))


class TimedCopier(CudaCopier):
    """Records when each copy is complete."""

    ends: ClassVar[list[torch.cuda.Event]] = []

    def __call__(self, batch):
        finish = super().__call__(batch)
        end = torch.cuda.Event(enable_timing=True)
        end.record(self._stream)
        TimedCopier.ends.append(end)
        return finish


@pytest.fixture
def copy_ends(monkeypatch):
    """The events at which the copies of this test were complete, in order."""
    TimedCopier.ends = []
    monkeypatch.setattr(training_data, "CudaCopier", TimedCopier)
    return TimedCopier.ends


def rows_of(run, kind):
    """The training data of a test, one batch per step; what workers send is small, since it is in shared memory."""
    if kind == "stream":
        return run.stream(RowRecords())
    workers = 2 if kind == "workers" else 0
    return run.shard(Rows(SMALL if workers else LARGE), shuffle=True, num_workers=workers)


@pytest.mark.parametrize("kind", ["shard", "workers", "stream"])
def test_the_next_batch_is_copied_while_a_step_computes_that_waits_for_the_gpu(copy_ends, kind):
    computes, wrong = [], torch.zeros((), dtype=torch.int64, device=DEVICE)
    with Run(global_batch=ROWS, seed=0, precision="fp32") as run:
        values = torch.randn(8192, 8192, device=DEVICE)
        (values @ values).sum().item()  # the first product loads a library
        for epoch in rows_of(run, kind).epochs(1):
            for step in epoch:
                for batch, _ in step:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(8):
                        values = torch.tanh(values @ values)
                    end.record()
                    expected = torch.as_tensor(step.last_indices, device=DEVICE)
                    wrong += (batch != expected[:, None]).sum()
                    torch.cuda.synchronize()  # as a script does that reads its loss in every step
                    computes.append((begin, end, len(copy_ends)))
        assert int(wrong) == 0
    assert [started for _, _, started in computes] == [2, 3, 4, 5, 6, 6]  # one ahead, until there is none
    for number, (begin, end, _) in enumerate(computes[:-1]):
        copied = copy_ends[number + 1]
        assert copied.elapsed_time(end) > 0, f"the copy for step {number + 1} ended after step {number}"
        if number and kind == "shard":  # workers and streams may have the next rows before this step begins
            assert begin.elapsed_time(copied) > 0, f"the copy for step {number + 1} was over before step {number} began"


def test_the_batches_in_memory_do_not_grow_with_the_steps_that_python_is_ahead_of_the_gpu():
    batch_bytes, before = ROWS * LARGE * 4, None
    with Run(global_batch=ROWS, seed=0, precision="fp32") as run:
        values, product = torch.randn(4096, 4096, device=DEVICE), torch.empty(4096, 4096, device=DEVICE)
        for epoch in run.shard(Rows(LARGE), num_workers=0).epochs(1):
            for step in epoch:
                if step.number == 1:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_stats()["active_bytes.all.current"]
                for batch, _ in step:
                    for _ in range(200):  # takes longer than to read a batch
                        torch.mm(values, values, out=product)
                    batch[:, 0].sum()
                    del batch
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    # `before` contains two batches, and there is a third one while the loop still refers to the one before
    assert before is not None
    assert peak - before < 1.5 * batch_bytes


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_starting_a_copy_does_not_wait_for_the_gpu():
    batch = {"image": torch.randn(3, 5), "label": torch.arange(3), "name": "a", "empty": torch.empty(0)}
    copier, keys = CudaCopier(DEVICE, torch.float64), torch.arange(7)
    try:
        torch.cuda.set_sync_debug_mode("error")
        moved, moved_keys = copier(batch)(), move_without_waiting(keys, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved["image"].cpu(), batch["image"].double())
    assert torch.equal(moved["label"].cpu(), batch["label"])
    assert (moved["name"], moved["empty"].device.type) == ("a", "cuda")
    assert torch.equal(moved_keys.cpu(), keys)


def plain(batches, device, dtype=None):
    """`batches_on_device` without copies ahead."""
    return (move_to_device(batch, device, dtype) for batch in batches)


class Records(IterableDataset):
    """Records of random numbers."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for index in range(50):
            yield torch.randn(16, generator=generator), index % 5


def records_in_memory():
    """The same records as a dataset."""
    return TensorDataset(
        *(torch.stack([torch.as_tensor(value) for value in column]) for column in zip(*Records(), strict=True))
    )


def train(kind, precision="fp32"):
    """Train with noise; return the weights and the sum of the scores of an evaluation."""
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # fp32 was requested explicitly
    with Run(global_batch=12, seed=0, precision=precision) as run:
        torch.manual_seed(5)
        model = run.wrap(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if kind == "stream":
            data = run.stream(Records(), micro_batch=5)
        else:
            data = run.shard(
                records_in_memory(), shuffle=True, num_workers=2 if kind == "workers" else 0, micro_batch=5
            )
        for epoch in data.epochs(2):
            for step in epoch:
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs + step.normal(16)), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
        with run.evaluate(model):
            scores = sum(model(inputs).double().sum() for inputs, _ in data)
        return [value.detach().cpu() for value in model.state_dict().values()], float(scores)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("kind", ["shard", "workers", "stream"])
def test_training_is_bit_identical_with_and_without_copies_ahead(monkeypatch, kind, precision):
    ahead, ahead_scores = train(kind, precision)
    for module in (shard, stream):
        monkeypatch.setattr(module, "batches_on_device", plain)
    without, scores = train(kind, precision)
    assert all(torch.equal(one, other) for one, other in zip(ahead, without, strict=True))
    assert ahead_scores == scores


def test_a_loop_that_is_left_early_leaves_no_copy_that_overwrites_later_tensors():
    with Run(global_batch=ROWS, seed=0) as run:
        data = run.shard(Rows(LARGE), num_workers=0)
        for _ in range(3):
            for batch, _ in data:
                batch[:, 0].sum()
                break
            later = [torch.zeros(ROWS, LARGE, device=DEVICE) for _ in range(3)]
            assert all(int(tensor.count_nonzero()) == 0 for tensor in later)
            del later, batch
