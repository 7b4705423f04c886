"""A Trainer with SameStep reads the same steps on any number of ranks, and resumes on another number."""

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.lightning.trained import (
    closing,
    fit,
    fit_numbers,
    make_trainer,
    max_difference,
    quiet,
    regression,
    weights,
)  # fmt: skip

pytestmark = pytest.mark.slow


def steps(runs, batches: int = 1, epoch: int | None = None) -> list[list[int]]:
    """Return the labels of each optimizer step over all ranks; a step has `batches` batches, the last one fewer."""
    seen = [run[1] for run in runs]
    count = len(seen[0])
    starts = [
        at
        for first in range(0, count, epoch or count)
        for at in range(first, min(first + (epoch or count), count), batches)
    ]
    ends = [*starts[1:], count]
    return [
        sorted(label for rank in seen for batch in rank[start:end] for label in batch)
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(ranks):
    (run,) = ranks(1, fit, 29, {}, {"max_epochs": 2})
    return run


def test_a_step_has_the_same_samples_on_one_rank_and_on_two(ranks, alone):
    two = ranks(2, fit, 29, {}, {"max_epochs": 2})
    assert steps(two) == [sorted(step) for step in alone[1]]
    assert max_difference(alone[0], two[0][0]) < 1e-6
    assert max_difference(two[0][0], two[1][0]) == 0


def test_each_epoch_has_every_sample_once_in_another_order(alone):
    first, second = ([label for step in epoch for label in step] for epoch in (alone[1][:4], alone[1][4:]))
    assert sorted(first) == sorted(second) == list(range(29))
    assert first != second


def test_three_ranks_that_do_not_divide_the_batch_get_the_same_weights(ranks, alone):
    three = ranks(3, fit, 29, {}, {"max_epochs": 2})
    assert steps(three) == [sorted(step) for step in alone[1]]
    assert max_difference(alone[0], three[0][0]) < 1e-6


def test_micro_batches_and_a_partial_last_window_do_not_change_the_weights(ranks, alone):
    for given, options, epoch in (({"micro_batch": 3}, {}, 7), ({}, {"accumulate_grad_batches": 2}, 8)):
        two = ranks(2, fit, 29, given, {"max_epochs": 2, **options})
        assert steps(two, 2, epoch) == [sorted(step) for step in alone[1]]
        assert max_difference(alone[0], two[0][0]) < 1e-6
        assert two[0][3] == alone[3] == (2, 8)


def test_a_last_step_smaller_than_the_world_counts_once(ranks):
    ((one, warnings_alone),) = ranks(1, fit_with_padding, 17)
    (two, warnings_0), (_, warnings_1) = ranks(2, fit_with_padding, 17)
    assert (warnings_alone, warnings_1) == ([], [])
    assert "the last step of each epoch has 1 sample(s) for 2 batch(es) on 2 rank(s)" in warnings_0[0]
    assert max_difference(one[0], two[0]) < 1e-6
    assert two[2]["train/loss_epoch"] == pytest.approx(one[2]["train/loss_epoch"], rel=1e-6)


def fit_with_padding(n):
    """Train and return the warnings about padding, which rank 0 issues."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="the last step of each epoch has")
        done = closing(fit_numbers, n, {}, {"max_epochs": 1})
    return done, [str(each.message) for each in caught if "the last step" in str(each.message)]


def test_drop_last_leaves_out_the_smaller_step(ranks):
    two = ranks(2, fit, 17, {"drop_last": True}, {"max_epochs": 1})
    assert [len(step) for step in steps(two)] == [8, 8]


def test_validation_reads_every_sample_once(ranks):
    runs = ranks(2, fit, 29, {}, {"max_epochs": 1})
    assert sorted(runs[0][4] + runs[1][4]) == list(range(29))


def save_midway(n, given, options, path, at, window):
    """Train one epoch and save a Lightning checkpoint in the middle of it."""
    from lightning.pytorch import Callback

    class Saving(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == at:
                trainer.save_checkpoint(path)
                trainer.should_stop = window  # end the run here, or continue

    return closing(fit_numbers, n, given, {**options, "callbacks": [Saving()]})


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3)])
def test_a_run_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(ranks, tmp_path, sizes, alone):
    path, (before, after) = str(tmp_path / "mid.ckpt"), sizes
    ranks(before, save_midway, 29, {}, {"max_epochs": 1}, path, 1, False)
    resumed = ranks(after, fit, 29, {}, {"max_epochs": 2}, path)
    assert steps(resumed) == [sorted(step) for step in alone[1][2:]]
    assert max_difference(alone[0], resumed[0][0]) < 1e-6
    assert resumed[0][3] == alone[3]


def test_a_run_resumes_with_another_accumulation(ranks, tmp_path, alone):
    path = str(tmp_path / "mid.ckpt")
    ranks(1, save_midway, 29, {"micro_batch": 2}, {"max_epochs": 1}, path, 7, False)  # two steps of four batches
    resumed = ranks(2, fit, 29, {"micro_batch": 2}, {"max_epochs": 2}, path)  # now two batches per rank
    assert steps(resumed, 2)[:2] == [sorted(step) for step in alone[1][2:4]]
    assert max_difference(alone[0], resumed[0][0]) < 1e-6


def test_an_interrupted_accumulation_window_starts_again(ranks, tmp_path, alone):
    path = str(tmp_path / "mid.ckpt")
    ranks(1, save_midway, 29, {"micro_batch": 2}, {"max_epochs": 1}, path, 5, False)  # inside the second step
    (resumed,) = ranks(1, fit, 29, {}, {"max_epochs": 2}, path)
    assert [sorted(step) for step in resumed[1]] == [sorted(step) for step in alone[1][1:]]
    assert max_difference(alone[0], resumed[0]) < 1e-6


def test_a_run_saved_at_the_end_of_an_epoch_resumes_with_the_next(ranks, tmp_path, alone):
    path = str(tmp_path / "end.ckpt")
    ranks(2, save_midway, 29, {}, {"max_epochs": 1}, path, 3, False)
    (resumed,) = ranks(1, fit, 29, {}, {"max_epochs": 2}, path)
    assert [sorted(step) for step in resumed[1]] == [sorted(step) for step in alone[1][4:]]
    assert max_difference(alone[0], resumed[0]) < 1e-6


@pytest.mark.parametrize("saved_at", [1, 3], ids=["midway", "at the end of an epoch"])
def test_a_checkpoint_of_other_data_is_an_error_before_the_first_step(ranks, tmp_path, saved_at):
    path = str(tmp_path / "saved.ckpt")
    ranks(1, save_midway, 29, {}, {"max_epochs": 1}, path, saved_at, False)
    changes = {"global_batch": (29, {"global_batch": 4}, 8), "seed": (29, {"seed": 7}, 0), "n": (30, {}, 29)}
    for name, (n, given, before) in changes.items():
        error, steps_done = ranks(1, fit_with_error, n, given, path)[0]
        assert f"the checkpoint has {name}={before} and this training has {name}=" in error, name
        assert ("pass SameStep(" in error) == (name != "n")
        assert steps_done == 0


def fit_with_error(n, given, path):
    """Return the error of a training that cannot resume, and how many batches it had seen by then."""
    from samestep.errors import StateError
    from samestep.lightning import SameStep
    from tests.lightning.trained import loader, make_trainer

    same, module = SameStep(**{"global_batch": 8, **given}), regression()
    with quiet(), pytest.raises(StateError) as raised:
        make_trainer(callbacks=[same], max_epochs=2).fit(
            module, datamodule=same.dataloaders(train=loader(n)), ckpt_path=path
        )
    return str(raised.value), len(module.seen)


def fit_weighted():
    return closing(_fit_weighted)


def _fit_weighted():
    from torch.utils.data import DataLoader, WeightedRandomSampler

    from samestep.lightning import SameStep
    from tests.lightning.trained import make_trainer, numbers

    same, module = SameStep(global_batch=8), regression()
    sampler = WeightedRandomSampler([0.0] * 8 + [1.0] * 8, 16)
    train = DataLoader(numbers(16), batch_size=2, sampler=sampler)
    make_trainer(callbacks=[same]).fit(module, datamodule=same.dataloaders(train=train))
    return {}, module.seen


def test_weighted_sampling_draws_the_same_samples_on_any_number_of_ranks(ranks):
    one, two = ranks(1, fit_weighted), ranks(2, fit_weighted)
    assert steps(two) == steps(one)
    assert min(min(step) for step in steps(one)) >= 8


def fit_resized(workers):
    """Return the shapes of all batches, read by persistent workers."""
    return closing(_fit_resized, workers)


def _fit_resized(workers):
    import torch
    from torch.utils.data import DataLoader

    from samestep.lightning import SameStep
    from tests.lightning.trained import make_trainer

    same = SameStep(global_batch=8, epoch_settings=resolution)
    module, sizes = regression(), []
    module.training_step = lambda batch: sizes.append(tuple(batch.shape)) or module.net(torch.zeros(1, 4)).mean()
    module.validation_step = lambda batch: sizes.append(("val", *batch.shape))
    data = same.dataloaders(
        train=DataLoader(Images(), batch_size=2, num_workers=workers), val=DataLoader(Images(), batch_size=8)
    )
    make_trainer(callbacks=[same], max_epochs=3).fit(module, datamodule=data)
    return sizes


class Images:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import torch

        from samestep import epoch_setting

        return torch.zeros(1, epoch_setting(), epoch_setting())


def resolution(epoch: int) -> int:
    return (8, 12, 16)[epoch]


def test_progressive_resizing_reaches_persistent_workers(ranks):
    for run in ranks(2, fit_resized, 1):
        sizes = [shape[-1] for shape in run]
        assert sizes == [8] * 3 + [12] * 3 + [16] * 3
        assert [shape[0] for shape in run if shape[0] != "val"] == [4] * 6


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("stream", "has no length, so its samples cannot be numbered"),
        ("batch_sampler", "uses a custom batch_sampler"),
        ("sampler", "uses a SubsetRandomSampler"),
        ("list", "train_dataloader() returned a list, and SameStep reads one torch DataLoader"),
        ("empty", "the dataset of train_dataloader() is empty"),
        ("both", "SameStep(micro_batch=2) splits a step into 4 batch(es) per rank, and the Trainer has"),
        ("not_its_own", "SameStep is a callback of the Trainer, but the training data does not come from it"),
        ("not_there", "the data comes from a SameStep that is not a callback of the Trainer"),
        ("scheduler", "Trainer.accumulate_grad_batches is 3, and a step of SameStep has 1 batch(es)"),
        ("alone", "this datamodule of SameStep has no Trainer yet"),
        ("worker_init", "worker_init_fn of the DataLoader of train_dataloader() is ignored"),
        ("dataset", "SameStep.datamodule got a TensorDataset: pass a LightningDataModule, or a LightningModule"),
        ("other_package", "Other is a class of the package pytorch_lightning, which is not the package lightning"),
    ],
)
def test_data_that_cannot_be_partitioned_exactly_is_an_error(ranks, case, text):
    (error,) = ranks.errors(1, misuse, case)
    assert text in error


def test_fewer_validation_samples_than_ranks_are_an_error(ranks):
    assert "an evaluation of 1 sample(s) cannot be split over 2 ranks" in ranks.errors(2, misuse, "few")[0]


def test_a_trainer_that_does_not_know_its_ranks_is_an_error_before_data_is_read(ranks):
    for error in ranks.errors(2, misuse, "no_launcher_args"):
        assert "WorldError" in error
        assert "2 rank(s) were started and the Trainer has a world size of 1, so each rank would train alone" in error
        assert "pass Trainer(..., **launcher_args()), with `from samestep.lightning import launcher_args`" in error


def launcher_args_with(variables):
    """Return `launcher_args()` in a process with these environment variables."""
    import os

    from samestep.lightning import launcher_args

    os.environ.update(variables)
    return {
        name: value if isinstance(value, str | int) else type(value).__name__ for name, value in launcher_args().items()
    }


def test_launcher_args_leave_processes_that_lightning_starts_to_lightning(ranks):
    alone = {"devices": "auto", "num_nodes": 1, "strategy": "auto"}
    assert ranks(1, launcher_args_with, {}) == [alone]
    assert ranks(1, launcher_args_with, {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}) == [alone]
    assert ranks(2, launcher_args_with, {}) == [{"devices": 2, "num_nodes": 1, "strategy": "DDPStrategy"}] * 2


def misuse(case):
    return closing(_misuse, case)


def _misuse(case):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler

    from samestep.lightning import SameStep
    from tests.lightning.trained import loader, make_trainer, numbers

    class Lines(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    class Own(BatchSampler):
        pass

    data, val, given, options = numbers(16), None, {}, {}
    made = {
        "stream": lambda: DataLoader(Lines()),
        "batch_sampler": lambda: DataLoader(data, batch_sampler=Own(SequentialSampler(data), 2, False)),
        "sampler": lambda: DataLoader(data, sampler=SubsetRandomSampler([1, 2])),
        "list": lambda: [loader(16)],
        "empty": lambda: DataLoader([]),
        "worker_init": lambda: DataLoader(data, num_workers=1, worker_init_fn=print),
    }.get(case, lambda: loader(16))()
    if case == "both":
        given, options = {"micro_batch": 2}, {"accumulate_grad_batches": 3}
    if case == "few":
        val = loader(1)
    callbacks = [GradientAccumulationScheduler({0: 3})] if case == "scheduler" else []
    same = SameStep(global_batch=8, **given)
    if case == "alone":
        same.dataloaders(train=made).train_dataloader()
    if case == "dataset":
        same.datamodule(data)
    if case == "other_package":
        same.datamodule(type("Other", (type("Theirs", (), {"__module__": "pytorch_lightning.core.datamodule"}),), {})())
    if case == "no_launcher_args":
        options = {"devices": 1, "strategy": "auto"}
    there = [] if case == "not_there" else [same]
    trainer = make_trainer(callbacks=[*there, *callbacks], **options)
    if case == "not_its_own":
        trainer.fit(regression(), made)
    else:
        trainer.fit(regression(), datamodule=same.dataloaders(train=made, val=val))


class Flipped(Dataset):
    """Rows with a random sign and noise from the global generators, as transforms of torchvision draw them."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        sign = -1.0 if random.random() < 0.5 else 1.0
        return sign * torch.rand(4) + float(np.random.rand()), torch.tensor(float(index))


def fit_flipped(workers):
    return closing(_fit_flipped, workers)


def _fit_flipped(workers):
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8, seed=0), regression()
    data = same.dataloaders(train=DataLoader(Flipped(), batch_size=4, shuffle=True, num_workers=workers))
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=data)
    return weights(module)


def test_an_augmentation_is_the_same_on_any_ranks_and_workers(ranks):
    (alone,) = ranks(1, fit_flipped, 0)
    two = ranks(2, fit_flipped, 1)
    assert max_difference(alone, two[0]) < 1e-6


def fit_data_of_each_rank():
    closing(_fit_data_of_each_rank)


def _fit_data_of_each_rank():
    from samestep.lightning import SameStep

    inputs = torch.rand(20, 4, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    same = SameStep(global_batch=8, seed=0)
    data = same.dataloaders(train=DataLoader(TensorDataset(inputs, torch.arange(20.0)), batch_size=4, shuffle=True))
    make_trainer(callbacks=[same]).fit(regression(), datamodule=data)


def test_data_that_differs_between_ranks_is_an_error_before_the_first_step(ranks):
    for error in ranks.errors(2, fit_data_of_each_rank):
        assert "DataError: TensorDataset differs between ranks: sample 0 is " in error
        assert "do not select samples by rank, since SameStep does that" in error
