"""Repairs of `samestep lint --fix`: the file keeps its format, parses, and has no finding afterwards."""

import ast
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.findings import Edit, Finding
from samestep.lint.fixes import apply_edits
from samestep.lint.linter import lint

EPOCHS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from lab import Net, data

dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(Net())
for epoch in range(3):
    # one epoch
    for x in enumerate(loader):
        model(x).mean().backward()
"""
LOG = """\
import lightning as L


class Model(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        {}


trainer = L.Trainer(devices=2, strategy="ddp")
"""
LOAD = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(2, 2).cuda()
model.load_state_dict({})
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def repaired(text: str) -> str:
    path = Path("train.py")
    path.write_bytes(text.encode())
    assert lint([path]).findings, "the example must have a fault"
    assert main(["lint", "--fix", "--no-cache", "train.py"]) == 0
    return path.read_bytes().decode()


def test_the_epoch_is_set_in_the_first_line_of_the_loop():
    fixed = EPOCHS.replace("    # one epoch\n", "    # one epoch\n    loader.sampler.set_epoch(epoch)\n")
    assert repaired(EPOCHS) == fixed


def test_line_ends_and_tabs_are_kept():
    text = EPOCHS.replace("    ", "\t").replace("\n", "\r\n")
    assert "\t# one epoch\r\n\tloader.sampler.set_epoch(epoch)\r\n\tfor x" in repaired(text)


@pytest.mark.parametrize(
    ("call", "fixed"),
    [
        ('self.log("val", self(batch).mean())', 'self.log("val", self(batch).mean(), sync_dist=True)'),
        ('self.log("é", self(batch).mean())  # é', 'self.log("é", self(batch).mean(), sync_dist=True)  # é'),
        (
            'self.log(\n            "val",\n            self(batch).mean(),\n        )',
            'self.log(\n            "val",\n            self(batch).mean(),\n            sync_dist=True,\n        )',
        ),
        (
            'self.log(\n            "val",\n            self(batch).mean()\n        )',
            'self.log(\n            "val",\n            self(batch).mean(),\n            sync_dist=True\n        )',
        ),
        (
            'self.log("val", self(batch).mean(),\n                 prog_bar=True)',
            'self.log("val", self(batch).mean(),\n                 prog_bar=True, sync_dist=True)',
        ),
    ],
)
def test_a_keyword_is_added_in_the_format_of_the_call(call, fixed):
    assert repaired(LOG.format(call)) == LOG.format(fixed)


def test_weights_are_loaded_to_the_cpu():
    assert repaired(LOAD.format('torch.load("model.pt")')) == LOAD.format('torch.load("model.pt", map_location="cpu")')


def test_a_diff_shows_the_change_and_makes_none(capsys):
    Path("train.py").write_text(EPOCHS)
    assert main(["lint", "--diff", "train.py"]) == 1
    assert "+    loader.sampler.set_epoch(epoch)\n" in capsys.readouterr().out
    assert Path("train.py").read_text() == EPOCHS


def test_of_edits_that_overlap_the_first_counts_and_what_does_not_parse_is_not_written():
    Path("a.py").write_text("f(1)\n")
    Path("b.py").write_text("f(1)\n")

    def finding(file: str, text: str) -> Finding:
        edit = Edit(str(Path(file).resolve()), 1, 3, 1, 3, text)
        return Finding("SS1", "a", "error", None, "", "", "", edits=(edit,))

    changed = apply_edits([finding("a.py", ", 2"), finding("a.py", ", 3"), finding("b.py", ")")])
    assert {path.name: text for path, text in changed.items()} == {"a.py": "f(1, 2)\n"}
    assert ast.parse(changed[Path("a.py").resolve()])
