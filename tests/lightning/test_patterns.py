"""Common patterns of modules, datamodules and callbacks are exact: late logs, unfreezing, reloading, limits."""

import json
import multiprocessing

import pytest
import torch

from samestep import read_metrics
from tests.lightning.trained import closing, loader, make_trainer, max_difference, regression, weights

pytestmark = pytest.mark.slow


def validate_logged_late(several):
    return closing(_validate_logged_late, several)


def _validate_logged_late(several):
    """Return values that a later callback and a hook of the module log, for 5 samples and perhaps for 29 more."""
    from lightning.pytorch import Callback

    from samestep.lightning import SameStep

    class LoggingCallback(Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("val/callback", batch[1].mean(), sync_dist=True)

    same, module = SameStep(global_batch=8), regression()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None

    def hook(outputs, batch, batch_idx, dataloader_idx=0):
        module.log("val/hook", batch[1].mean(), sync_dist=True)

    module.on_validation_batch_end = hook
    sets = [loader(5, rows=2, shuffle=False), loader(29, shuffle=False)] if several else loader(5, 2, shuffle=False)
    trainer = make_trainer(callbacks=[same, LoggingCallback()])
    values = trainer.validate(module, datamodule=same.dataloaders(val=sets), verbose=False)
    assert module.on_validation_batch_end is hook
    assert "on_test_batch_end" not in vars(module)
    return values


def test_values_logged_after_validation_step_are_exact(ranks):
    for size in (1, 2):
        for (values,) in ranks(size, validate_logged_late, False):
            assert values == {"val/callback": 2.0, "val/hook": 2.0}
    for first, second in ranks(2, validate_logged_late, True):
        assert first == {"val/callback/dataloader_idx_0": 2.0, "val/hook/dataloader_idx_0": 2.0}
        assert second == {"val/callback/dataloader_idx_1": 14.0, "val/hook/dataloader_idx_1": 14.0}


def fit_unfreezing(unused):
    return closing(_fit_unfreezing, unused)


def _fit_unfreezing(unused):
    """Unfreeze a layer in the second epoch with Lightning's callback; with `unused` no step uses it."""
    from lightning.pytorch.callbacks import BaseFinetuning

    from samestep.lightning import SameStep

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.late)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.late, optimizer)

    same, module = SameStep(global_batch=8, micro_batch=3), regression()
    module.late = torch.nn.Linear(4, 4) if unused else module.net[0]
    module.configure_optimizers = lambda: torch.optim.SGD(
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.01
    )
    trainer = make_trainer(callbacks=[same, Unfreezing()], max_epochs=3)
    trainer.fit(module, datamodule=same.dataloaders(train=loader(29)))
    return weights(module)


def test_parameters_that_are_unfrozen_during_training_get_the_same_weights_on_every_rank(ranks):
    (one,) = ranks(1, fit_unfreezing, False)
    two = ranks(2, fit_unfreezing, False)
    assert max_difference(two[0], two[1]) == 0
    assert max_difference(one, two[0]) < 1e-6
    assert (
        max_difference(one, weights(regression()) | {name: one[name] for name in one if name.startswith("late")}) > 1e-3
    )


def test_an_unfrozen_parameter_that_is_not_used_is_an_error(ranks):
    for size in (1, 2):
        for rank, error in enumerate(ranks.errors(size, fit_unfreezing, True)):
            assert f"step 4 did not use 2 parameter(s) on rank {rank}: late.weight, late.bias" in error


def fit_with_two_backward_passes():
    return closing(_fit_with_two_backward_passes)


def _fit_with_two_backward_passes():
    """Train with manual optimization and two backward passes of one loss."""
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8), regression()
    module.automatic_optimization = False
    loss = type(module).training_step

    def training_step(batch):
        optimizer, value = module.optimizers(), loss(module, batch)
        optimizer.zero_grad()
        module.manual_backward(value, retain_graph=True)
        module.manual_backward(value)
        optimizer.step()

    module.training_step = training_step
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=same.dataloaders(train=loader(29)))
    return weights(module)


def test_two_backward_passes_of_one_loss_are_scaled_the_same(ranks):
    (one,) = ranks(1, fit_with_two_backward_passes)
    assert max_difference(one, ranks(2, fit_with_two_backward_passes)[0]) < 1e-6  # steps of 29 are uneven on two ranks


def fit_reloading():
    return closing(_fit_reloading)


def _fit_reloading():
    """Return the number of data workers at the end of each epoch, with new loaders in every epoch."""
    from samestep.lightning import SameStep

    same, module, workers = SameStep(global_batch=8), regression(), []
    module.on_train_epoch_end = lambda: workers.append(len(multiprocessing.active_children()))
    data = same.dataloaders(train=loader(16, workers=1), val=loader(16, shuffle=False, workers=1))
    make_trainer(callbacks=[same], max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, datamodule=data)
    return workers


def test_new_loaders_end_the_workers_of_the_previous_ones(ranks):
    assert ranks(1, fit_reloading) == [[2, 2, 2]]


def fit_after_a_failure():
    return closing(_fit_after_a_failure)


def _fit_after_a_failure():
    """Return what a failed training leaves (workers, parameter hooks, module hooks), and the steps of another one."""
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8), regression()
    data = same.dataloaders(train=loader(29, workers=1), val=loader(29, shuffle=False))
    module.on_before_optimizer_step = lambda optimizer: 1 / 0
    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=data)
    del module.on_before_optimizer_step
    left = [name for name in vars(module) if name.startswith("on_")]
    left += [name for name, p in module.named_parameters() if p._post_accumulate_grad_hooks]
    left += multiprocessing.active_children()
    trainer = make_trainer(callbacks=[same], max_epochs=2)
    trainer.fit(module, datamodule=data)
    return left, trainer.global_step


def test_a_failed_training_leaves_no_workers_and_hooks(ranks):
    assert ranks(1, fit_after_a_failure) == [([], 8)]


def fit_with_attributes():
    return closing(_fit_with_attributes)


def _fit_with_attributes():
    """Return an attribute of the datamodule that the module reads, and a hyperparameter from its checkpoint."""
    from lightning.pytorch import LightningDataModule

    from samestep.lightning import SameStep

    class Data(LightningDataModule):
        def __init__(self, rows: int = 4):
            super().__init__()
            self.save_hyperparameters()
            self.classes = 7

        def train_dataloader(self):
            return loader(16, rows=self.hparams.rows)

    same, module, seen = SameStep(global_batch=8), regression(), []
    module.on_fit_start = lambda: seen.append(module.trainer.datamodule.classes)
    trainer = make_trainer(callbacks=[same])
    trainer.fit(module, datamodule=same.datamodule(Data(rows=3)))
    trainer.save_checkpoint("data.ckpt")
    assert not hasattr(same.dataloaders(train=loader(16)), "classes")
    return seen, Data.load_from_checkpoint("data.ckpt").hparams.rows


def test_a_module_finds_the_attributes_and_hparams_of_its_datamodule(ranks):
    assert ranks(1, fit_with_attributes) == [([7], 3)]


def fit_two_optimizers(folder):
    return closing(_fit_two_optimizers, folder)


def _fit_two_optimizers(folder):
    """Train with two optimizers that both step in a batch, in epochs limited to two of four steps."""
    from samestep.lightning import FileLogger, SameStep

    same, module = SameStep(global_batch=8), regression()
    module.automatic_optimization = False
    loss = type(module).training_step

    def training_step(batch):
        value = loss(module, batch)
        for optimizer in module.optimizers():
            optimizer.zero_grad()
        module.manual_backward(value)
        for optimizer in module.optimizers():
            optimizer.step()
        return value

    module.training_step = training_step
    module.configure_optimizers = lambda: [
        torch.optim.SGD(module.net[0].parameters(), lr=0.01),
        torch.optim.SGD(module.net[2].parameters(), lr=0.02),
    ]
    trainer = make_trainer(callbacks=[same, FileLogger(folder)], max_epochs=2, limit_train_batches=2)
    trainer.fit(module, datamodule=same.dataloaders(train=loader(29), val=loader(29, shuffle=False)))
    return same.steps_per_epoch


def test_files_count_steps_of_the_global_batch_with_several_optimizers(ranks, tmp_path):
    assert ranks(2, fit_two_optimizers, str(tmp_path)) == [2, 2]
    records = read_metrics(tmp_path / "metrics.jsonl", by_step=True)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [step for step, record in enumerate(records) if "val/label" in record] == [1, 3]
    assert [step for step, record in enumerate(records) if "train/loss_epoch" in record] == [1, 3]
    assert all(record["train/learning_rate/optimizer1"] == 0.02 for record in records)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4


def validate_weighted():
    return closing(_validate_weighted)


def _validate_weighted():
    from torch.utils.data import DataLoader, WeightedRandomSampler

    from samestep.lightning import SameStep
    from tests.lightning.trained import numbers

    same = SameStep(global_batch=8)
    val = DataLoader(numbers(4), sampler=WeightedRandomSampler([0.0, 0.0, 1.0, 1.0], 4))
    make_trainer(callbacks=[same]).validate(regression(), datamodule=same.dataloaders(val=val), verbose=False)


def test_sampling_weights_of_an_evaluation_are_ignored_with_a_warning(ranks):
    (error,) = ranks.errors(1, validate_weighted)
    assert "the WeightedRandomSampler of val_dataloader() is ignored: an evaluation reads every sample once" in error
