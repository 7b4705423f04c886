"""A GPU that is really full in the first steps: half the micro-batch, the same weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Run

fraction = float(sys.argv[1])
torch.cuda.set_per_process_memory_fraction(fraction)
with Run(global_batch=64, seed=0, precision="fp32") as run:
    model = run.wrap(nn.Sequential(nn.Linear(64, 1 << 20), nn.GELU(), nn.Linear(1 << 20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    for epoch in run.shard(TensorDataset(rows), shuffle=True, workers=0).epochs(1):
        for step in epoch:
            for (x,) in step:
                step.mean(model(x).square().squeeze(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model[2].weight.detach().cpu(), sys.argv[2])
"""


def train(folder: Path, gigabytes: float, name: str) -> str:
    """Run the script with so much memory; what launcher and run said."""
    fraction = gigabytes * 2**30 / torch.cuda.get_device_properties(0).total_memory
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", "1", "train.py", str(fraction), name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_full_gpu_halves_the_micro_batch_and_learns_the_same(tmp_path):
    told = train(tmp_path, 0.9, "tight.pt")  # 0.52 GiB of weights and gradients, 8 MiB or more a row
    assert "out of memory in the first steps, so all ranks start anew with half the micro-batch" in told
    assert "since that ran out of memory; the global batch of 64 and what is learnt stay the same" in told
    assert "start anew with half" not in train(tmp_path, 20, "roomy.pt")
    tight, roomy = (torch.load(tmp_path / name) for name in ("tight.pt", "roomy.pt"))
    assert torch.allclose(tight, roomy, rtol=0, atol=1e-6)
