"""SIGTERM under `samestep run`: a Trainer with SameStep saves, exits with 75, and the next start continues exactly."""

import json
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import read_metrics
from tests.launch.launched import Ended, run_script, start
from tests.lightning.trained import closing, loader, make_trainer, max_difference, regression, weights

pytestmark = pytest.mark.slow

# Three epochs of eight steps, each followed by a validation.
SCRIPT = """
    import os, sys, time, warnings
    warnings.filterwarnings("ignore", module="lightning")
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from samestep.lightning import FileLogger, SameStep, launcher_args

    options = set(sys.argv[1:])


    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def training_step(self, batch):
            loss = (self.net(batch[0])[:, 0] - batch[0].sum(1)).square().mean()
            self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if "slow" in options:
                if self.global_step == 11:
                    open(f"up-{self.global_rank}", "w").close()
                time.sleep(0.1)

        def validation_step(self, batch):
            self.log("val", self.net(batch[0]).mean())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


    data = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
    same = SameStep(global_batch=8, seed=0, micro_batch=3)
    saving = [] if "unsaved" in options else [ModelCheckpoint("out")]
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[same, FileLogger("files"), *saving], logger=False,
        enable_checkpointing=bool(saving), enable_progress_bar=False, enable_model_summary=False, **launcher_args(),
    )
    net = Net()
    trainer.fit(
        net, datamodule=same.dataloaders(train=loader, val=loader), ckpt_path="fresh" not in options and "last" or None
    )
    if trainer.is_global_zero:
        torch.save(net.state_dict(), "weights.pt")
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Two launches that SIGTERM ends after 11 steps: with and without a ModelCheckpoint."""
    launches = {"saved": ["slow"], "unsaved": ["slow", "unsaved"]}
    command = ["--nproc-per-node", "2", "--folder", "kept", "train.py"]
    started = {name: start(tmp_path_factory.mktemp(name), SCRIPT, *command, *more) for name, more in launches.items()}
    for run in started.values():
        run.wait_for_ranks(2, 100)
        run.process.send_signal(signal.SIGTERM)
        run.process.send_signal(signal.SIGTERM)  # as a cluster may do: it counts as the same signal
    return {name: run.finish() for name, run in started.items()}


def train(path, *options):
    closing(run_script, path, *options)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "files" / "summary.json").read_text())


def test_sigterm_without_a_model_checkpoint_exits_with_143(stopped):
    ended = stopped["unsaved"]
    assert (ended.code, ended.left) == (143, []), ended.err
    assert summary(ended.folder)["status"] == "stopped"
    assert "SIGTERM: this Trainer has no ModelCheckpoint, so nothing is saved; it ends at step" in ended.err
    assert not (ended.folder / "out").exists()


def test_sigterm_saves_and_exits_with_75(stopped):
    ended = stopped["saved"]
    assert (ended.code, ended.left) == (75, []), ended.err
    assert [path.name for path in (ended.folder / "out").iterdir() if "last" in path.name] == ["last-preempted.ckpt"]
    done = summary(ended.folder)
    assert done["status"] == "preempted"
    assert 11 <= done["steps"] < 24
    assert f"samestep: preempted: saved step {done['steps']}; start the job again to resume" in ended.err
    assert "SIGTERM: saved out/last-preempted.ckpt; the training ends here, start it again to resume" in ended.err


def test_a_training_that_would_start_again_from_the_beginning_is_an_error(ranks, stopped, monkeypatch):
    monkeypatch.chdir(stopped["saved"].folder)
    for error in ranks.errors(2, train, stopped["saved"].folder / "train.py", "fresh"):
        assert (
            "out/last-preempted.ckpt has the state of a training that a signal or a time limit ended, and this "
            "training would start from the beginning: pass trainer.fit(..., ckpt_path='last'), or remove the file"
        ) in error


def test_the_next_start_ends_with_the_weights_of_an_undisturbed_training(ranks, stopped, tmp_path, monkeypatch):
    folder = stopped["saved"].folder
    for where, size in ((folder, 3), (tmp_path, 2)):
        monkeypatch.chdir(where)
        ranks(size, train, folder / "train.py")
    assert not (folder / "out" / "last-preempted.ckpt").exists()
    assert max_difference(torch.load(folder / "weights.pt"), torch.load(tmp_path / "weights.pt")) < 1e-13
    resumed, whole = (read_metrics(at / "files" / "metrics.jsonl", by_step=True) for at in (folder, tmp_path))
    assert [record["step"] for record in resumed] == list(range(24))
    assert sum("val" in record for record in whole) == 3
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() & {"train/loss", "train/learning_rate", "val"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-12), (name, theirs["step"])


def stop_and_resume(stop_at, global_batch, options):
    return closing(_stop_and_resume, stop_at, global_batch, options)


def _stop_and_resume(stop_at, global_batch, options):
    """Send SIGTERM after `stop_at` batches, if not None, and start again; return weights, events and exit codes."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint

    from samestep.lightning import SameStep

    events, codes = [], []

    class Record(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            events.append((trainer.current_epoch, "batch", batch_idx, sorted(batch[1].int().tolist())))
            if stop_at == sum(event[1] == "batch" for event in events):
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_end(self, trainer, pl_module):
            events.append((trainer.current_epoch, "validation", float(trainer.callback_metrics["val/label"])))

        def on_train_epoch_end(self, trainer, pl_module):
            events.append((trainer.current_epoch, "end"))

    for _ in range(2 if stop_at else 1):
        same, module = SameStep(global_batch=global_batch), regression(0.01, torch.optim.AdamW)
        trainer = make_trainer(
            callbacks=[same, Record(), ModelCheckpoint("kept")], max_epochs=3, enable_checkpointing=True, **options
        )
        data = same.dataloaders(train=loader(24), val=loader(24, shuffle=False))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
                trainer.fit(module, datamodule=data, ckpt_path="last")
        except SystemExit as error:
            codes.append(error.code)
    return weights(module), events, codes, trainer.global_step


@pytest.mark.parametrize(
    ("stop_at", "global_batch", "options"),
    [
        pytest.param(2, 8, {}, id="inside an epoch"),
        pytest.param(3, 8, {}, id="at the end of an epoch"),
        pytest.param(1, 24, {}, id="in epochs of one step"),
        pytest.param(4, 4, {"val_check_interval": 2}, id="before a validation inside an epoch"),
        pytest.param(5, 8, {"check_val_every_n_epoch": 2}, id="before an epoch with a validation"),
    ],
)
def test_a_training_continues_at_the_same_batch_and_validation(ranks, tmp_path, stop_at, global_batch, options):
    ((whole, expected, _, steps),) = ranks(1, stop_and_resume, None, global_batch, options)
    shutil.rmtree("kept")
    ((resumed, events, codes, resumed_steps),) = ranks(1, stop_and_resume, stop_at, global_batch, options)
    assert codes == [75]
    assert events == expected
    assert resumed_steps == steps
    assert max_difference(resumed, whole) == 0


def signaled(case):
    return closing(_signaled, case)


def _signaled(case):
    """Send a signal in a training without a fixed folder, or in a validation; return (exit code, messages, steps)."""
    import logging

    from lightning.pytorch.loggers import CSVLogger

    from samestep.lightning import SameStep

    same, module, messages = SameStep(global_batch=8), regression(), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    number = signal.SIGUSR1 if case == "warning" else signal.SIGTERM
    hook = "on_validation_batch_start" if case == "validation" else "on_train_batch_end"
    setattr(module, hook, lambda *_: os.kill(os.getpid(), number) if same_once(module) else None)
    versioned = {"logger": CSVLogger("logs"), "enable_checkpointing": True} if case == "versioned" else {}
    trainer = make_trainer(callbacks=[same], **versioned)
    data, code = same.dataloaders(train=loader(24), val=loader(24, shuffle=False)), None
    try:
        trainer.validate(module, datamodule=data) if case == "validation" else trainer.fit(module, datamodule=data)
    except SystemExit as error:
        code = error.code
    finally:
        logger.removeHandler(handler)
    return code, "\n".join(messages), trainer.global_step


def same_once(module):
    """Whether this is the first call."""
    first, module.signaled = not hasattr(module, "signaled"), True
    return first


def test_a_warning_without_a_model_checkpoint_does_not_end_the_training(ranks):
    ((code, messages, steps),) = ranks(1, signaled, "warning")
    assert (code, steps) == (None, 3)
    assert "SIGUSR1: this Trainer has no ModelCheckpoint, so nothing is saved; it continues" in messages


def test_a_checkpoint_that_the_next_start_does_not_find_exits_with_143(ranks, tmp_path):
    ((code, messages, _),) = ranks(1, signaled, "versioned")
    file = "logs/lightning_logs/version_0/checkpoints/last-preempted.ckpt"
    assert code == 143
    assert (
        f"SIGTERM: saved {file}; the training ends here, and ckpt_path='last' will not find the file, since the logger "
        "chooses another folder in the next start: pass the path as ckpt_path, and pass ModelCheckpoint(dirpath=...)"
    ) in messages
    assert (tmp_path / file).exists()


def test_sigterm_in_a_validation_exits_with_143(ranks):
    assert [code for code, _, _ in ranks(1, signaled, "validation")] == [143]
