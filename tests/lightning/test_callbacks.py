"""FileLogger, once and StopAllRanks; a user's datamodule keeps its hooks; Lightning's classes are not changed."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samestep import read_metrics
from samestep.report.facts import facts_of
from samestep.report.run_data import read_run
from samestep.report.verdict import describe_run
from tests.launch.launched import wait_for
from tests.lightning.trained import closing, loader, make_trainer, regression

pytestmark = pytest.mark.slow


def fit_logged(folder, fail=False):
    return closing(_fit_logged, folder, fail)


def _fit_logged(folder, fail):
    from torch.optim.lr_scheduler import LambdaLR

    from samestep.lightning import FileLogger, SameStep

    same, module = SameStep(global_batch=8), regression()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    schedule = {"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}
    module.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": schedule}
    if fail:
        module.on_train_epoch_start = lambda: 1 / (1 - module.current_epoch)
    trainer = make_trainer(callbacks=[same, FileLogger(folder)], max_epochs=2, log_every_n_steps=3)
    trainer.fit(module, datamodule=same.dataloaders(train=loader(29), val=loader(29, shuffle=False)))


def test_files_have_loss_and_learning_rate_of_every_step_on_one_rank_as_on_two(ranks, tmp_path):
    for size in (1, 2):
        ranks(size, fit_logged, str(tmp_path / str(size)))
    one, two = (read_metrics(tmp_path / size / "metrics.jsonl", by_step=True) for size in ("1", "2"))
    assert [record["step"] for record in two] == list(range(8))
    assert [record["train/learning_rate"] for record in two] == pytest.approx([0.01 / (1 + step) for step in range(8)])
    for a, b in zip(one, two, strict=True):
        for name in a.keys() - {"time"}:
            assert b[name] == pytest.approx(a[name], rel=1e-5), name
    assert two[3]["val/label"] == 14.0
    assert "train/loss_epoch" in two[7]
    assert "train/loss_step" not in two[7]  # it is the value of one rank
    text = (tmp_path / "2" / "log.txt").read_text()
    assert "Regression: 49 trainable parameters, 2 rank(s)" in text
    assert "val/label 14" in text
    summary = json.loads((tmp_path / "2" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("finished", 8, 2)
    assert summary["metrics"]["val/count"] == 29.0


def test_the_summary_of_a_failed_run_says_so(ranks, tmp_path):
    (error,) = ranks.errors(1, fit_logged, str(tmp_path), True)
    assert "ZeroDivisionError" in error
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert describe_run(read_run(tmp_path)).text.endswith("ZeroDivisionError: division by zero")


def test_a_report_shows_what_a_trainer_did(ranks, tmp_path):
    ranks(2, fit_logged, str(tmp_path))
    run = read_run(tmp_path)
    assert (describe_run(run).status, run.last.ranks) == ("finished", 2)
    facts = facts_of(run)
    assert (facts["global batch"], facts["seed"], facts["steps"]) == ("8", "0", "8")
    assert facts["model"] == "Regression, 49 parameters"
    assert [event["step"] for event in run.last.named("evaluation")] == [3, 7]


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for error in ranks.errors(2, fit_logged, str(tmp_path / "file" / "logs")):
        assert "NotADirectoryError" in error
        assert "raised on rank 0 in once(_open), for every rank:" in error


class UnpicklableError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def use_once(case):
    return closing(_use_once, case)


def _use_once(case):
    from samestep.lightning import once
    from tests.lightning.trained import loader

    module, got = regression(), []

    def work():
        if case == "raises":
            raise FileNotFoundError("no words.txt")
        if case == "unpicklable":
            raise UnpicklableError("no words", 2)
        with Path("worked.txt").open("a") as file:
            file.write("x")
        return {"words": 3}

    module.on_train_start = lambda: got.append(once(module, work))
    make_trainer(max_epochs=1).fit(module, loader(8))
    return got


def test_once_runs_on_rank_0_and_all_ranks_get_its_value_or_error(ranks, tmp_path):
    assert ranks(2, use_once, "works") == [[{"words": 3}]] * 2
    assert (tmp_path / "worked.txt").read_text() == "x"
    for error in ranks.errors(2, use_once, "raises"):
        assert "FileNotFoundError: no words.txt" in error
        assert "raised on rank 0 in once(work), for every rank:" in error
    for error in ranks.errors(2, use_once, "unpicklable"):
        assert "OnceFailed" in error
        assert "no words" in error


def fit_stopped(early):
    return closing(_fit_stopped, early)


def _fit_stopped(early):
    """Return the step at which each rank stops: by a flag of one rank, or by EarlyStopping on a metric of all."""
    from lightning.pytorch.callbacks import EarlyStopping

    from samestep.lightning import SameStep, StopAllRanks

    same, module = SameStep(global_batch=8), regression()
    step = type(module).training_step

    def training_step(batch):
        if (
            not early
            and module.trainer.global_rank == module.trainer.world_size - 1
            and module.trainer.global_step == 2
        ):
            module.trainer.should_stop = True
        return step(module, batch)

    module.training_step = training_step
    stop = EarlyStopping("val/label", patience=2, mode="min") if early else StopAllRanks()
    trainer = make_trainer(callbacks=[same, stop], max_epochs=9)
    trainer.fit(module, datamodule=same.dataloaders(train=loader(29), val=loader(29, shuffle=False)))
    return trainer.global_step


def test_all_ranks_stop_if_one_sets_should_stop(ranks):
    assert ranks(2, fit_stopped, False) == [3, 3]


def test_early_stopping_stops_at_the_same_step_on_one_rank_and_on_two(ranks):
    assert ranks(1, fit_stopped, True) == [12]
    assert ranks(2, fit_stopped, True) == [12, 12]


def attributes(*classes):
    """Return every attribute of the classes and their bases, by name and identity."""
    return {
        (kind.__name__, name): id(value)
        for top in classes
        for kind in inspect.getmro(top)
        if kind is not object
        for name, value in vars(kind).items()
        if name not in ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")
    }


def fit_and_close(name):
    """Fit, and wait until rank 0 has closed its store: a rank that starts again must not connect to the old one."""
    fit_logged(name)
    closed = Path(f"{name}-closed-by-{os.environ.get('WORLD_SIZE', 1)}")
    if os.environ.get("RANK", "0") == "0":
        closed.touch()
    wait_for(closed.exists, 120)


def attributes_changed_by_a_fit():
    """Return which attributes of classes of Lightning and torch a training with samestep changed."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    classes = (
        Trainer, LightningModule, LightningDataModule, Callback, DDPStrategy, SingleDeviceStrategy, _FitLoop,
        _ResultMetric, DistributedDataParallel, DataLoader, torch.optim.SGD, torch.Tensor,
    )  # fmt: skip
    before = attributes(*classes)
    fit_and_close("first")
    fit_and_close("second")
    after = attributes(*classes)
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def test_samestep_does_not_patch_lightning(ranks):
    for size in (1, 2):
        assert ranks(size, attributes_changed_after_a_warm_up) == [[]] * size


def attributes_changed_after_a_warm_up():
    fit_and_close("warm")  # Lightning and torch set some attributes on first use
    return attributes_changed_by_a_fit()


def use_datamodule():
    return closing(_use_datamodule)


def _use_datamodule():
    """Train with a datamodule that has hooks and a state."""
    from lightning.pytorch import LightningDataModule

    from samestep.lightning import SameStep

    calls = []

    class Data(LightningDataModule):
        def prepare_data(self):
            calls.append("prepare")

        def setup(self, stage):
            assert self.trainer is not None
            calls.append(f"setup {stage.value}")

        def teardown(self, stage):
            calls.append(f"teardown {stage.value}")

        def train_dataloader(self):
            return loader(16)

        def val_dataloader(self):
            return [loader(8, shuffle=False), loader(6, shuffle=False)]

        def state_dict(self):
            return {"version": 3}

        def load_state_dict(self, state):
            calls.append(f"state {state['version']}")

        def on_after_batch_transfer(self, batch, dataloader_idx):
            calls.append("transferred") if "transferred" not in calls else None
            return batch

    same, module = SameStep(global_batch=8), regression()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log("val/label", batch[1].mean())
    trainer = make_trainer(callbacks=[same], max_epochs=1)
    trainer.fit(module, datamodule=same.datamodule(Data()))
    trainer.save_checkpoint("saved.ckpt")
    again = SameStep(global_batch=8)
    make_trainer(callbacks=[again], max_epochs=2).fit(regression(), datamodule=again.dataloaders(train=loader(16)))
    third = SameStep(global_batch=8)
    make_trainer(callbacks=[third], max_epochs=2).fit(
        module, datamodule=third.datamodule(Data()), ckpt_path="saved.ckpt"
    )
    return calls, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_datamodule_keeps_its_hooks_and_several_validation_sets(ranks):
    runs = ranks(2, use_datamodule)
    assert runs[0][0][:3] == ["prepare", "setup fit", "transferred"]
    assert runs[1][0][:2] == ["setup fit", "transferred"]  # one rank per node prepares the data
    for calls, metrics in runs:
        assert "teardown fit" in calls
        assert "state 3" in calls
        assert metrics["val/label/dataloader_idx_0"] == 3.5
        assert metrics["val/label/dataloader_idx_1"] == 2.5


def test_without_lightning_the_error_names_the_extra():
    script = "import sys; sys.modules['lightning'] = None; from samestep.lightning import SameStep"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "samestep.lightning needs Lightning and cannot import it" in ended.stderr
    assert "pip install 'samestep[lightning]'" in ended.stderr


def test_the_package_can_be_imported_without_lightning():
    script = "import sys, samestep.lightning; assert 'lightning' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
