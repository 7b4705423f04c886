"""Repairs of `samestep lint --fix`: the file keeps its format, parses, and has no finding afterwards."""

import json
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
        ('self.log("val", self(batch).mean(),)', 'self.log("val", self(batch).mean(), sync_dist=True,)'),
        ('self.log("val", (self(batch).mean()))', 'self.log("val", (self(batch).mean()), sync_dist=True)'),
        (
            'self.log(\n            "val",\n            (self(batch).mean())  # (own), batch\n        )',
            'self.log(\n            "val",\n            (self(batch).mean()),  # (own), batch\n'
            "            sync_dist=True\n        )",
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


def edit_of(file: str, text: str) -> Finding:
    edit = Edit(str(Path(file).resolve()), 1, 3, 1, 3, text)
    return Finding("SS1", "a", "error", None, "", "", "", edits=(edit,))


def test_of_edits_that_overlap_the_first_counts_and_what_does_not_parse_is_left_out():
    Path("a.py").write_text("f(1)\n")
    Path("b.py").write_text("f(1)\n")
    findings = [edit_of("a.py", ", 2"), edit_of("a.py", ", 3"), edit_of("b.py", ")")]
    result = apply_edits(findings)
    assert {path.name: text for path, text in result.changed.items()} == {"a.py": "f(1, 2)\n"}
    assert result.left_out == [
        (findings[1], "another edit changes the same position"),
        (findings[2], "the file would not parse afterwards"),
    ]


FUNCTIONS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from lab import Net, data


def make_loader(dataset):
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))


def train_epoch(model, batches):
    for x in batches:
        model(x).mean().backward()


dist.init_process_group("gloo")
train_loader = make_loader(data)
model = DistributedDataParallel(Net())
for epoch in range(3):
    train_epoch(model, train_loader)
"""
SET = "    train_loader.sampler.set_epoch(epoch)\n"


def test_the_epoch_is_set_also_if_a_function_reads_the_loader_and_another_one_makes_it():
    fixed = FUNCTIONS.replace("    train_epoch(model, train", SET + "    train_epoch(model, train")
    assert repaired(FUNCTIONS) == fixed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "    return DataLoader(",
            "    if not dist.is_initialized():\n        return list(dataset)\n    return DataLoader(",
        ),
        (
            "sampler=DistributedSampler(dataset)",
            "sampler=DistributedSampler(dataset) if dist.is_initialized() else None",
        ),
    ],
)
def test_set_epoch_is_under_a_condition_if_the_sampler_is_distributed_only_sometimes(before, after):
    text = repaired(FUNCTIONS.replace(before, after))
    assert f'    if hasattr(train_loader.sampler, "set_epoch"):\n    {SET}' in text


def test_the_epoch_of_an_attribute_is_set():
    text = FUNCTIONS[: FUNCTIONS.index("dist.init")] + (
        "class Trainer:\n\tdef __init__(self):\n\t\tself.loader = make_loader(data)\n"
        "\t\tself.model = DistributedDataParallel(Net())\n\n\tdef fit(self):\n\t\tfor epoch in range(3):\n"
        "\t\t\tself.run()\n\n\tdef run(self):\n\t\ttrain_epoch(self.model, self.loader)\n\n\n"
        'dist.init_process_group("gloo")\nTrainer().fit()\n'
    )
    assert "range(3):\n\t\t\tself.loader.sampler.set_epoch(epoch)\n\t\t\tself.run()" in repaired(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "train_epoch(model, train_loader)\n",
            "loader = train_loader\n    train_epoch(model, loader)\n    del loader\n",
        ),
        ("for epoch in", "for _ in"),
        ("    train_epoch(model, train_loader)", "    [train_epoch(model, each) for each in [train_loader]]"),
    ],
)
def test_the_epoch_is_not_set_if_the_loop_has_no_name_for_it_or_for_the_loader(before, after, capsys):
    text = FUNCTIONS.replace(before, after)
    Path("train.py").write_text(text)
    code = main(["lint", "--fix", "--no-cache", "train.py"])
    if code == 0:  # a name that is in use in the loop
        assert SET in Path("train.py").read_text()
    else:
        assert Path("train.py").read_text() == text
        assert "error SS102" in capsys.readouterr().out


def test_a_keyword_is_not_added_to_a_call_that_may_have_it():
    text = LOG.format('self.log("val", self(batch).mean(), **self.options)')
    Path("train.py").write_text(text)
    assert main(["lint", "--fix", "--no-cache", "train.py"]) == 1
    assert Path("train.py").read_text() == text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_the_encoding_of_a_file_is_kept(encoding):
    head = "# -*- coding: latin-1 -*-\n# caf\xe9\n" if encoding == "latin-1" else "# caf\xe9\n"
    Path("train.py").write_bytes((head + EPOCHS).encode(encoding))
    assert main(["lint", "--fix", "--no-cache", "train.py"]) == 0
    text = Path("train.py").read_bytes().decode(encoding)
    assert text.startswith(head)
    assert "loader.sampler.set_epoch(epoch)" in text


def test_a_file_that_cannot_be_written_is_an_error(capsys, monkeypatch):
    Path("train.py").write_text(EPOCHS)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", "train.py")

    monkeypatch.setattr("samestep.lint.source_files.write_text", refuse)
    assert main(["lint", "--fix", "--no-cache", "train.py"]) == 2
    assert "train.py cannot be repaired: [Errno 13] Permission denied" in " ".join(capsys.readouterr().err.split())


def test_a_notebook_is_not_repaired():
    cells = [{"cell_type": "code", "source": EPOCHS.splitlines(keepends=True)}]
    before = json.dumps({"cells": cells, "nbformat": 4})
    Path("train.ipynb").write_text(before)
    assert main(["lint", "--fix", "--no-cache", "train.ipynb"]) == 1
    assert Path("train.ipynb").read_text() == before
