"""Trainers with `SameStep` that are used wrongly: what each ends with. One process runs all: imports are slow."""

import pytest

from tests.faults.harness import Fault, run_script

SETUP = """
import os, sys, threading, warnings
from pathlib import Path
warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from samestep.lightning import SameStep

x = torch.arange(16.0)[:, None] / 16


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 5:
            raise OSError("bad sample")
        return x[index], x[index]


class Records(IterableDataset):
    def __iter__(self):
        return iter([(x[0], x[0])] * 16)


def callback(raised):
    class Raises(pl.Callback):
        def on_train_batch_end(self, *args):
            raise raised
    return Raises()


def loader(**options):
    return DataLoader(TensorDataset(x, x), **{"batch_size": 4, **options})


def fit(data=None, callbacks=(), same=None, ckpt_path=None, **options):
    same = same or SameStep(global_batch=4)
    trainer = pl.Trainer(
        callbacks=[same, *callbacks], accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )
    trainer.fit(Model(), datamodule=same.dataloaders(train=loader() if data is None else data), ckpt_path=ckpt_path)
    return f"{trainer.global_step} steps"


def attempt(name, function):
    try:
        answer = function()
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    print(f"<{name}> {answer} </{name}>")

"""
# Name, call, and what it ends with.
CASES = [
    ("nothing wrong", "fit()", "4 steps"),
    ("no data", "fit(DataLoader([], batch_size=4))", "DataError: the dataset of train_dataloader() is empty"),
    ("no batches", "fit(limit_train_batches=0)", "0 steps"),
    ("no steps", "fit(max_steps=0)", "0 steps"),
    ("a quick run", "fit(fast_dev_run=True)", "1 steps"),
    ("a callback that raises", "fit(callbacks=[callback(ZeroDivisionError('in it'))])", "ZeroDivisionError: in it"),
    ("a callback that exits", "fit(callbacks=[callback(SystemExit(5))])", "SystemExit: 5"),
    ("an interrupt", "fit(callbacks=[callback(KeyboardInterrupt())])", "SystemExit: 1"),
    ("a missing checkpoint", "fit(ckpt_path='nowhere.ckpt')", "Checkpoint file not found: nowhere.ckpt"),
    ("a corrupt checkpoint", "(Path('a.ckpt').write_bytes(b'no'), fit(ckpt_path='a.ckpt'))", "UnpicklingError"),
    ("an empty checkpoint", "(Path('b.ckpt').touch(), fit(ckpt_path='b.ckpt'))", "EOFError"),
    ("a global batch of zero", "fit(same=SameStep(global_batch=0))", "global_batch is 0 and must be at least 1"),
    ("a global batch in quotes", "fit(same=SameStep(global_batch='4'))", "global_batch is '4' and must be an integer"),
    (
        "a stream",
        "fit(DataLoader(Records(), batch_size=4))",
        "DataError: the dataset of train_dataloader() has no length",
    ),
    ("two loaders", "fit([loader(), loader()])", "train_dataloader() returned a list, and SameStep reads one torch"),
    ("a sampler", "fit(loader(sampler=SubsetRandomSampler([1])))", "uses a SubsetRandomSampler: use shuffle=True"),
    (
        "a sample that fails",
        "fit(DataLoader(Data(), batch_size=4))",
        "SampleError: sample 5 could not be read on rank 0",
    ),
    (
        "a setting that cannot be sent",
        "fit(loader(num_workers=1), same=SameStep(global_batch=4, epoch_settings=lambda epoch: threading.Lock()))",
        "DataError: epoch_settings returned a lock that cannot be sent to data workers",
    ),
    (
        "loaders that did not pass SameStep",
        "pl.Trainer(callbacks=[SameStep(global_batch=4)], accelerator='cpu', logger=False).fit(Model(), loader())",
        "DataError: SameStep is a callback of the Trainer, but the training data does not come from it",
    ),
    (
        "two callbacks",
        "fit(callbacks=[SameStep(global_batch=4)])",
        "more than one stateful callback of type `SameStep`",
    ),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    calls = "\n".join(f"attempt({name!r}, lambda: {call})" for name, call, _ in CASES)
    ended = run_script(Fault("Lightning", "", script=SETUP + calls), tmp_path_factory.mktemp("lightning"))
    assert ended.codes == [0], ended.outputs[0]
    return " ".join(ended.outputs[0].split())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [(name, says) for name, _, says in CASES], ids=[name for name, *_ in CASES])
def test_a_trainer_ends_with_a_sentence(output, name, says):
    assert says in output.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
