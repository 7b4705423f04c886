"""`samestep lint --confirm`: what lint is not sure of is kept only if a run shows it."""

from pathlib import Path

import pytest

from samestep.cli.main import main

pytestmark = pytest.mark.slow

SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
lengths = torch.tensor([2, 8] * 16)
mask = (torch.arange(8) < lengths[:, None]).float()
data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), {mask})
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, shuffle=False)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, m in DataLoader(data, batch_size=4, sampler=sampler):
        losses = (model(x) - x).square() * m
        optimizer.zero_grad()
        (losses.sum() / m.sum()).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("mask", "code"), [("mask", 1), ("torch.ones(32, 8)", 0)])
def test_a_mean_by_the_rank_s_own_count_is_kept_only_if_the_counts_differ(tmp_path, monkeypatch, capsys, mask, code):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(mask=mask))
    assert main(["lint", "--no-cache", "train.py"]) == 1
    assert "SS206" in capsys.readouterr().out
    assert main(["lint", "--no-cache", "--confirm", "--", "train.py"]) == code
    out, err = capsys.readouterr()
    assert ("SS206" in out) is bool(code)
    assert ("confirmed by `samestep verify`: SS206" in " ".join(out.split())) is bool(code)
    assert ("verify did not confirm 1 finding" in err) is not bool(code)
