"""A training script for tests of lint: models, data and a loop, into which the cases put their lines."""

import textwrap
from pathlib import Path

from samestep.lint.linter import lint

SETUP = """
import argparse, contextlib, copy, os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Net(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.head = nn.Linear(d, 2)
    def forward(self, x):
        return self.head(self.body(x))
    def features(self, x):
        return self.body(x)
def make_loader(ds):
    sampler = DistributedSampler(ds)
    return DataLoader(ds, batch_size=8, sampler=sampler), sampler
dist.init_process_group("nccl")
rank = dist.get_rank()
world_size = dist.get_world_size()
ds = TensorDataset(torch.zeros(64, 8), torch.zeros(64).long())
loader, sampler = make_loader(ds)
"""
LOOP = """
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
"""


def findings_of(folder: Path, before: str, body: str) -> tuple[list[str], list[str]]:
    """The rules of the families 2 and 6 that report the marked line, and what they report elsewhere."""
    loop = LOOP + textwrap.indent(textwrap.dedent(body), " " * 8) if body.strip() else ""
    script = SETUP + textwrap.dedent(before) + loop
    path = folder / "script.py"
    path.write_text(script)
    result = lint([path])
    assert result.problems == {}
    marked = [number for number, line in enumerate(script.splitlines(), 1) if line.endswith("# here")]
    found = [(each.code, each.location.line if each.location else 0) for each in result.findings]
    own = [(code, line) for code, line in found if code.startswith(("SS2", "SS6"))]
    here = [code for code, line in own if line in marked]
    return here, [f"{code} in line {line}" for code, line in own if line not in marked]
